"""Dispatch with balanced placement: every rank receives exactly its quota of rows, whatever the routing.

    rows, count, handle = dispatch(x, idx, weight, group=group, num_experts=E)
    w1, w3, w2 = (handle.borrow(w) for w in (w1, w3, w2))        own experts, then E/P places for borrowed ones
    y = combine(experts(rows, count, w1, w3, w2), handle)

The plan of `megamoe.ops.moe_plan` is a function of the gathered counts, so every rank computes it for itself. A borrowed
expert's weights come from its owner before the experts run; in backward its gradient goes home and is added there in rank
order. Sums over a token's experts stay in ascending expert id at its home: a token's result differs from fixed placement only
by how a product rounds its rows.

This is the plain form over all_to_all_single, for CPU and GPU: it reads the counts on the host, once. Shapes are static all
the same: quota rows, 2 E/P experts. Source: arXiv:2607.24653 sec. 5.2.1; code ours.
Letters: N tokens, A experts per token, E experts, e = E/P, P ranks, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.ops.collectives import all_to_all
from megamoe.ops.moe_dispatch import reference
from megamoe.ops.moe_plan import Plan, assign, plan


@dataclass
class Handle:
    """What `combine` and `borrow` need."""

    local: reference.Handle
    plan: Plan
    group: object

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        return self.local.combine(out_RD)

    def borrow(self, w_e: torch.Tensor) -> torch.Tensor:
        """(e, ...) own experts -> (2e, ...): own, then borrowed in ascending id, then zeros. Differentiable. Collective."""
        own, ranks = w_e.shape[0], dist.get_world_size(self.group)
        me = dist.get_rank(self.group)
        borrowed = [[e for e in line if e >= 0] for line in self.plan.borrowed_Pe.tolist()]
        lent = [[e - me * own for e in line if e // own == me] for line in borrowed]
        order = [e for line in lent for e in line]
        sent = _Lend.apply(w_e, torch.tensor(order, dtype=torch.int64, device=w_e.device))
        from_rank = [sum(e // own == p for e in borrowed[me]) for p in range(ranks)]
        # Borrowed ids ascend and so do their owners: arrival order is id order.
        arrived = all_to_all(sent, [len(line) for line in lent], from_rank, self.group)
        return torch.cat([w_e, arrived, w_e.new_zeros(own - arrived.shape[0], *w_e.shape[1:])])


class _Lend(torch.autograd.Function):
    """w[order]; backward adds the returning gradients one after the other, in rank order: no atomics, same bits."""

    @staticmethod
    def forward(ctx, w_e, order):
        ctx.save_for_backward(order)
        ctx.shape = w_e.shape
        return w_e.index_select(0, order)

    @staticmethod
    def backward(ctx, dw):
        (order,) = ctx.saved_tensors
        home = dw.new_zeros(ctx.shape)
        for i, e in enumerate(order.tolist()):
            home[e] += dw[i]
        return home, None


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts):
    """See the contract in `megamoe.ops.moe_dispatch`; count is (2 E/P,), own experts first. Without a group: the reference."""
    if group is None:
        return reference.dispatch(x_ND, topk_idx_NA, topk_weight_NA, group=None, num_experts=num_experts)
    rows_RD, count_E, local = reference.dispatch(x_ND, topk_idx_NA, topk_weight_NA, group=None, num_experts=num_experts)
    ranks, me, own = dist.get_world_size(group), dist.get_rank(group), num_experts // dist.get_world_size(group)
    gathered = [torch.empty_like(count_E) for _ in range(ranks)]
    dist.all_gather(gathered, count_E, group=group)
    counts_PE = torch.stack(gathered).long()
    chosen = plan(counts_PE.sum(0), ranks)

    # My rows are in expert order; a row's place among all slots of its expert is known from the counts of earlier ranks.
    filled = int(count_E.sum())
    expert_R = torch.repeat_interleave(torch.arange(num_experts, device=x_ND.device), count_E.long(), output_size=filled)
    first_E = count_E.long().cumsum(0) - count_E
    place_R = torch.arange(filled, device=x_ND.device) - first_E[expert_R] + counts_PE[:me].sum(0)[expert_R]
    rank_R, _ = assign(expert_R, place_R, chosen)
    slot_PE = _local_index(chosen, own)  # where each rank keeps each expert, -1 where it does not

    # Leave by rank, within a rank by its local index, then token; the sort is stable, so tokens keep their order.
    leaving_R = torch.argsort(rank_R * (2 * own) + slot_PE[rank_R, expert_R], stable=True)
    sent = torch.bincount(rank_R, minlength=ranks).tolist()
    outgoing = reference._Permute.apply(rows_RD, torch.cat([leaving_R, torch.arange(filled, rows_RD.shape[0], device=x_ND.device)]))

    # What arrives, per source and local index: the overlap of the source's slots of an expert with my share of it.
    received_P2e = _overlaps(counts_PE, chosen, me, slot_PE[me], own)
    received = received_P2e.sum(1).tolist()
    index = torch.arange(2 * own, device=x_ND.device).repeat(ranks).repeat_interleave(received_P2e.reshape(-1), output_size=sum(received))
    exchange = reference.Exchange(group, sent, received, torch.argsort(index, stable=True))
    local.exchange = _Exchange(exchange, leaving_R)
    return exchange.out(outgoing), received_P2e.sum(0).int(), Handle(local, chosen, group)


@dataclass
class _Exchange:
    """The way back of `reference.Exchange`, and from leaving order to expert order."""

    exchange: reference.Exchange
    leaving_R: torch.Tensor

    def back(self, out_RD: torch.Tensor, num_slots: int) -> torch.Tensor:
        home = self.exchange.back(out_RD, num_slots)
        rest = torch.arange(self.leaving_R.shape[0], num_slots, device=home.device)
        return reference._Permute.apply(home, torch.cat([torch.argsort(self.leaving_R), rest]))


def _local_index(chosen: Plan, own: int) -> torch.Tensor:
    """(P, E) int64: 0 … e-1 for own experts, e … 2e-1 for borrowed ones, -1 elsewhere."""
    E, ranks = chosen.share_EP.shape
    slot_PE = torch.full((ranks, E + 1), -1, dtype=torch.int64, device=chosen.share_EP.device)
    place = torch.arange(own, device=slot_PE.device).expand(ranks, own)
    slot_PE.scatter_(1, torch.where(chosen.borrowed_Pe < 0, E, chosen.borrowed_Pe).long(), own + place)
    slot_PE.scatter_(1, torch.arange(E, device=slot_PE.device).view(ranks, own), place)
    return slot_PE[:, :E]


def _overlaps(counts_PE, chosen: Plan, me: int, slot_E, own: int) -> torch.Tensor:
    """(P, 2e) int64: rows from each source for each of my local experts."""
    ranks, E = counts_PE.shape
    rank_P = torch.arange(ranks, device=counts_PE.device)
    owner_E1 = torch.arange(E, device=counts_PE.device)[:, None] // own
    # My share of expert x begins behind its owner's and those of lower borrowers; an owner's begins at 0.
    mine_first = torch.where(owner_E1 == me, False, (rank_P < me) | (rank_P == owner_E1))
    begin_E = (chosen.share_EP.long() * mine_first).sum(1)
    end_E = begin_E + chosen.share_EP[:, me]
    source_end_PE = counts_PE.cumsum(0)
    overlap_PE = (torch.minimum(source_end_PE, end_E) - torch.maximum(source_end_PE - counts_PE, begin_E)).clamp(min=0)
    received_P2e = torch.zeros(ranks, 2 * own + 1, dtype=torch.int64, device=counts_PE.device)
    received_P2e.scatter_add_(1, torch.where(slot_E < 0, 2 * own, slot_E).expand(ranks, E), overlap_PE)
    return received_P2e[:, : 2 * own]
