"""Dispatch with balanced placement: every rank computes the same number of rows, whatever the routing.

    rows, count, handle = dispatch(x, idx, weight, group=group, num_experts=E)
    w1, w3, w2 = handle.borrow(w1, w3, w2)              own experts, then E/P places for borrowed ones
    y = combine(experts(rows, count, w1, w3, w2), handle)

The plan of `megamoe.ops.moe_plan` is a function of the gathered counts, so every rank computes it for itself. A borrowed
expert's weights come from its owner before the experts run; in backward its gradient goes home and is added there in rank
order. Sums over a token's experts stay in ascending expert id at its home: a token's result differs from fixed placement only
by how a product rounds its rows.

This is the plain form over all_to_all_single, for CPU and GPU: the plan is read on the host, once a call. Shapes are static all
the same: N*A rows (more only where this rank has fewer tokens than others), 2 E/P experts.
Source: arXiv:2607.24653 sec. 5.2.1; code ours.
Letters: N tokens, A experts per token, E experts, e = E/P, P ranks, R rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megamoe.ops.collectives import all_to_all
from megamoe.ops.moe_dispatch import reference
from megamoe.ops.moe_plan import Plan, assign, plan
from megamoe.ops.precision import wide
from megamoe.utils.torch_compat import all_gather_single


@dataclass(frozen=True)
class Loans:
    """Which experts change places for one micro-batch, as this rank sees it.

    Attributes:
        lent: local index of each copy that leaves, by borrowing rank, then id.
        lent_to, borrowed_from: copies to and from each rank. Borrowed ids ascend, and so do their owners: what arrives in rank
            order is in id order.
    """

    group: Any
    lent: list[int]
    lent_to: list[int]
    borrowed_from: list[int]

    @staticmethod
    def of(borrowed_Pe: list[list[int]], me: int, own: int, group) -> Loans:
        ids = [[x for x in line if x >= 0] for line in borrowed_Pe]
        lent = [[x - me * own for x in line if x // own == me] for line in ids]
        return Loans(group, [x for line in lent for x in line], [len(line) for line in lent], [sum(x // own == p for x in ids[me]) for p in range(len(ids))])

    @property
    def num_borrowed(self) -> int:
        return sum(self.borrowed_from)

    def bring(self, w_e: torch.Tensor) -> torch.Tensor:
        """The borrowed experts of a stack (e, ...), (num_borrowed, ...). Collective."""
        return all_to_all(w_e[self.lent], self.lent_to, self.borrowed_from, self.group)

    def send_home(self, dw: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """(num_borrowed, ...) gradients to their owners: for each expert lent, by local index, what came back, in rank order. Collective."""
        back: dict[int, list[torch.Tensor]] = defaultdict(list)
        for e, d in zip(self.lent, all_to_all(dw, self.borrowed_from, self.lent_to, self.group)):
            back[e].append(d)
        return back


@dataclass
class Handle:
    """What `combine` and `borrow` need. `local`: the handle of this rank's own packing, whose exchange is replaced."""

    local: Any
    loans: Loans

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        return self.local.combine(out_RD)

    def borrow(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each (e, ...) own experts -> (2e, ...): own, then borrowed in ascending id, then zeros. Differentiable.

        A borrowed expert's gradient is added to its owner's, after the owner's own and in rank order. Where a weight carries
        `main_grad` (see `grouped_mlp/triton.py`), so does what is returned: the owner's runs, then an fp32 buffer that is made
        when backward asks for it and sent home afterwards. Collective, and so is the backward.
        """
        own = weights[0].shape[0]
        away = [_MainGrad(w.main_grad, self.loans.num_borrowed, w) if getattr(w, "main_grad", None) is not None else None for w in weights]
        stacks = _Borrow.apply(self.loans, away, own, *weights)
        for w, a in zip(stacks, away):
            if a is not None:
                w.main_grad = a
        return stacks


class _MainGrad:
    """fp32 gradients of a stack of own and borrowed experts: called in backward, returns the runs to add into."""

    def __init__(self, home, num_borrowed: int, like: torch.Tensor):
        self.home = (home,) if isinstance(home, torch.Tensor) else tuple(home)
        self.away_shape, self.device = (num_borrowed, *like.shape[1:]), like.device
        self.away: torch.Tensor | None = None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self.away_shape[0] == 0:
            return self.home
        if self.away is None:
            self.away = torch.zeros(self.away_shape, dtype=torch.float32, device=self.device)
        return (*self.home, self.away)

    def take_away(self) -> torch.Tensor:
        """What was added for borrowed experts; zeros when the experts had no row at all."""
        away, self.away = self.away, None
        return torch.zeros(self.away_shape, dtype=torch.float32, device=self.device) if away is None else away

    def add_home(self, e: int, dw: torch.Tensor) -> None:
        for run in self.home:
            if e < run.shape[0]:
                run[e] += dw
                return
            e -= run.shape[0]


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loans: Loans, away, own: int, *weights):
        ctx.loans, ctx.away, ctx.own = loans, away, own
        # None tells a gradient that was added into main_grad from one of zeros.
        ctx.set_materialize_grads(False)
        stacks = []
        for w in weights:
            stack = w.new_zeros(2 * own, *w.shape[1:])
            stack[:own] = w
            stack[own : own + loans.num_borrowed] = loans.bring(w)
            stacks.append(stack)
        return tuple(stacks)

    @staticmethod
    def backward(ctx, *grads):
        own, loans, out = ctx.own, ctx.loans, []
        for dw, away, wanted in zip(grads, ctx.away, ctx.needs_input_grad[3:]):
            home = None
            if dw is not None:
                home = dw[:own].clone()
                for e, back in loans.send_home(dw[own : own + loans.num_borrowed]).items():
                    total = home[e].to(wide(home.dtype))
                    for d in back:
                        total = total + d
                    home[e] = total
            elif away is not None and wanted:
                for e, back in loans.send_home(away.take_away()).items():
                    for d in back:
                        away.add_home(e, d)
            out.append(home)
        return None, None, None, *out


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts, local: Callable = reference.dispatch):
    """See the contract in `megamoe.ops.moe_dispatch`; count is (2 E/P,), own experts first. Without a group: `local` alone.

    local: the backend that packs this rank's rows by expert and sums them when they are back.
    """
    rows_RD, count_E, handle = local(x_ND, topk_idx_NA, topk_weight_NA, group=None, num_experts=num_experts)
    if group is None:
        return rows_RD, count_E, handle
    ranks, me, own = dist.get_world_size(group), dist.get_rank(group), num_experts // dist.get_world_size(group)
    counts_PE = count_E.new_empty(ranks * num_experts)
    all_gather_single(counts_PE, count_E.contiguous(), group=group)
    counts_PE = counts_PE.view(ranks, num_experts).long()
    chosen = plan(counts_PE.sum(0), ranks)
    slot_PE = _local_index(chosen, own)

    # My rows are in expert order; a row's place among all slots of its expert is known from the counts of earlier ranks.
    slots = rows_RD.shape[0]
    expert_R = _repeat(torch.cat([torch.arange(num_experts, device=x_ND.device), count_E.new_full((1,), -1).long()]), torch.cat([count_E.long(), slots - count_E.sum(0, keepdim=True)]), slots)
    first_E = count_E.long().cumsum(0) - count_E
    place_R = torch.arange(slots, device=x_ND.device) - first_E[expert_R] + counts_PE[:me].sum(0)[expert_R]
    rank_R, _ = assign(expert_R, place_R, chosen)
    rank_R = torch.where(rank_R < 0, ranks, rank_R)
    # Leave by rank, within a rank by its local index, then token (the sort is stable); empty slots behind.
    index_R = torch.where(rank_R < ranks, slot_PE[rank_R.clamp(max=ranks - 1), expert_R], 0)
    leaving_R = torch.argsort(rank_R * (2 * own) + index_R, stable=True)
    sent_P = torch.bincount(rank_R, minlength=ranks + 1)[:ranks]

    # What arrives, per source and local index: the overlap of the source's slots of an expert with my share of it.
    received_P2e = _overlaps(counts_PE, chosen, me, slot_PE[me], own)
    sent, received, *borrowed = torch.cat([torch.stack([sent_P, received_P2e.sum(1)]), chosen.borrowed_Pe.long().T]).tolist()  # the one host sync
    index = _repeat(torch.arange(2 * own, device=x_ND.device).repeat(ranks), received_P2e.reshape(-1), sum(received))
    exchange = reference.Exchange(group, sent, received, torch.argsort(index, stable=True))
    handle.exchange = _Exchange(exchange, leaving_R)
    loans = Loans.of([list(line) for line in zip(*borrowed)], me, own, group)
    return handle.exchange.out(rows_RD), received_P2e.sum(0).int(), Handle(handle, loans)


@dataclass
class _Exchange:
    """`reference.Exchange` behind a reordering from expert order to leaving order, padded to as many rows as there are slots."""

    exchange: reference.Exchange
    leaving_R: torch.Tensor

    def out(self, rows_RD: torch.Tensor) -> torch.Tensor:
        return _pad(self.exchange.out(reference._Permute.apply(rows_RD, self.leaving_R)), rows_RD.shape[0])

    def back(self, out_RD: torch.Tensor, num_slots: int) -> torch.Tensor:
        home = self.exchange.back(out_RD[: sum(self.exchange.received)], num_slots)
        return reference._Permute.apply(home, torch.argsort(self.leaving_R))


def _pad(rows_RD: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - rows_RD.shape[0]
    return torch.cat([rows_RD, rows_RD.new_zeros(missing, rows_RD.shape[1])]) if missing > 0 else rows_RD


def _repeat(values: torch.Tensor, times: torch.Tensor, total: int) -> torch.Tensor:
    return values.repeat_interleave(times, output_size=total)


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
