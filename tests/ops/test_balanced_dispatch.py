"""Balanced placement computes what fixed placement computes, with the same number of rows on every rank.

Why: it moves experts between ranks for one micro-batch; a gradient that does not find its way home trains a copy. Compared in
float64 on gloo ranks, forward and in every gradient, under even and extreme routing. Not covered: CUDA, timing.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megamoe.ops.grouped_mlp.reference import grouped_mlp
from megamoe.ops.moe_dispatch import balanced, combine, reference
from megamoe.testing.distributed import run_distributed

E, A, D, F = 8, 2, 6, 5


def tokens(rank: int, kind: str):
    gen = torch.Generator().manual_seed(rank)
    N = 0 if kind == "empty rank" and rank == 1 else 12
    score = torch.randn(N, E, generator=gen)
    if kind == "one expert":
        score[:, 5] += 100
    idx = score.topk(A, dim=1).indices
    if kind == "holes":
        idx[torch.rand(N, A, generator=gen) < 0.4] = -1
    make = lambda *s: torch.randn(s, generator=gen, dtype=torch.float64)  # noqa: E731
    return make(N, D), idx, make(N, A), make(N, D)


def num_slots(kind: str, ranks: int) -> list[int]:
    return [0 if kind == "empty rank" and rank == 1 else 12 * A for rank in range(ranks)]


class AddsIntoMainGrad(torch.autograd.Function):
    """The reference's experts with the habit of the Triton ones: weight gradients are added into fp32 runs that backward asks for."""

    @staticmethod
    def forward(ctx, rows, count, runs, *ws):
        ctx.runs, ctx.count = runs, count
        ctx.save_for_backward(rows, *ws)
        return grouped_mlp(rows, count, *ws, act="situ")

    @staticmethod
    def backward(ctx, dout):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            drows, *dws = torch.autograd.grad(grouped_mlp(leaves[0], ctx.count, *leaves[1:], act="situ"), leaves, dout)
        for dw, main_grad in zip(dws, ctx.runs):
            first = 0
            for run in main_grad() if callable(main_grad) else main_grad:
                run += dw[first : first + len(run)]
                first += len(run)
            assert first == len(dw)
        return drows, None, None, *[None] * len(dws)


def into_main_grads(x, idx, weight, ws, dy, group):
    """Largest difference of main grads to `fixed`'s weight gradients is the caller's affair: returns (dx, main grads)."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *ws)]
    for w in leaves[1:]:
        # In two places, as an optimizer that shards a stack over owners keeps them, and not empty before.
        w.main_grad = (torch.ones(1, *w.shape[1:]), torch.ones(len(w) - 1, *w.shape[1:]))
    rows, count, handle = balanced.dispatch(leaves[0], idx, weight, group=group, num_experts=E)
    mlp = lambda rows, count, *stacks: AddsIntoMainGrad.apply(rows, count, [s.main_grad for s in stacks], *stacks)  # noqa: E731
    combine(handle.compute(mlp, rows, count, *leaves[1:]), handle).backward(dy)
    assert all(w.grad is None for w in leaves[1:])
    return leaves[0].grad, [torch.cat(w.main_grad) - 1 for w in leaves[1:]]


def one_rank(kinds):
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    own, found = E // ranks, []
    gen = torch.Generator().manual_seed(99)
    everywhere = [torch.randn(E, *s, generator=gen, dtype=torch.float64) for s in ((F, D), (F, D), (D, F))]
    for kind in kinds:
        x, idx, weight, dy = tokens(rank, kind)
        runs = []
        for op in (reference.dispatch, balanced.dispatch):
            leaves = [t.clone().requires_grad_() for t in (x, weight, *(w[rank * own : (rank + 1) * own] for w in everywhere))]
            rows, count, handle = op(leaves[0], idx, leaves[1], group=group, num_experts=E)
            mlp = partial(grouped_mlp, act="situ")
            out = mlp(rows, count, *leaves[2:]) if op is reference.dispatch else handle.compute(mlp, rows, count, *leaves[2:])
            y = combine(out, handle)
            runs.append((rows.shape[0], int(count.sum()), [y, *torch.autograd.grad(y, leaves, dy)]))
        (_, _, fixed), (num_rows, filled, moved) = runs
        worst = max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(fixed, moved))
        dx, main_grads = into_main_grads(x, idx, weight, leaves[2:], dy, group)
        fp32 = max((a.double() - b).abs().max().item() if a.numel() else 0.0 for a, b in zip((dx, *main_grads), (fixed[1], *fixed[3:])))
        assert fp32 < 2e-5, (kind, fp32)
        found.append((kind, num_rows, filled, worst, max(t.abs().max().item() for t in fixed[3:])))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_balanced_placement_equals_fixed_placement_and_loads_every_rank_alike(ranks):
    kinds = ["random", "one expert", "holes", "empty rank"]
    results = run_distributed(one_rank, ranks, kinds)
    for i, kind in enumerate(kinds):
        per_rank = [result[i] for result in results]
        assert all(worst < 1e-12 for _, _, _, worst, _ in per_rank), (kind, per_rank)
        assert any(size > 1e-3 for *_, size in per_rank)  # the gradients compared are not zeros
        loads = [filled for _, _, filled, _, _ in per_rank]
        assert max(loads) - min(loads) <= 1, (kind, loads)
        # Rows are as many as there are slots, so that shapes do not change with the routing; a rank without tokens has its quota.
        assert all(num_rows == max(slots, filled) for (_, num_rows, filled, _, _), slots in zip(per_rank, num_slots(kind, ranks))), (kind, per_rank)
