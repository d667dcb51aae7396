"""The plan in plain Python integers."""

from __future__ import annotations

import torch

from megamoe.ops.moe_plan import Plan, quotas


def plan(count_E, ranks):
    """See the contract in `megamoe.ops.moe_plan`. Reads the counts on the host."""
    left = [int(c) for c in count_E.tolist()]  # native slots that their owner still has
    E, own = len(left), len(left) // ranks
    quota = quotas(sum(left), ranks)
    share = [[0] * ranks for _ in range(E)]
    borrowed = [[] for _ in range(ranks)]
    load = [sum(left[p * own : (p + 1) * own]) for p in range(ranks)]
    while True:
        over = [load[p] - quota[p] for p in range(ranks)]
        giver, taker = over.index(max(over)), over.index(min(over))
        if over[taker] == 0:
            break
        missing = -over[taker]
        load[giver] -= missing
        load[taker] += missing
        while missing:
            e = max(range(giver * own, (giver + 1) * own), key=lambda i: (left[i], -i))
            moved = min(left[e], missing)
            left[e] -= moved
            missing -= moved
            share[e][taker] = moved
            borrowed[taker].append(e)
    for e in range(E):
        share[e][e // own] += left[e]
    device = count_E.device
    padded = [sorted(b) + [-1] * (own - len(b)) for b in borrowed]
    return Plan(torch.tensor(share, dtype=torch.int32, device=device).view(E, ranks), torch.tensor(padded, dtype=torch.int32, device=device).view(ranks, own))
