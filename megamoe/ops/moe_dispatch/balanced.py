"""Dispatch with balanced placement: every rank computes the same number of rows, whatever the routing.

    rows, count, handle = dispatch(x, idx, weight, group=group, num_experts=E)
    y = combine(handle.compute(mlp, rows, count, w1, w3, w2), handle)           mlp(rows, count, *weights): grouped_mlp

The plan of `megamoe.ops.moe_plan` is a function of the gathered counts, so every rank computes it for itself. A borrowed
expert's weights come from its owner before the experts run; in backward its gradient goes home and is added there in rank
order. Sums over a token's experts stay in ascending expert id at its home: a token's result differs from fixed placement only
by how a product rounds its rows.

This is the plain form over all_to_all_single, for CPU and GPU: the plan is read on the host, once a call, so that memory is held for
the experts really borrowed and not for the E/P that might be. The rows' shape is static all the same: N*A (more only where this
rank has fewer tokens than others).
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
    """What `combine` and `compute` need.

    Attributes:
        local: the handle of this rank's own packing, whose exchange is replaced.
        rows: rows of own experts, then of borrowed ones.
    """

    local: Any
    loans: Loans
    rows: tuple[int, int]

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        return self.local.combine(out_RD)

    def compute(self, mlp: Callable[..., torch.Tensor], rows_RD: torch.Tensor, count: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """`mlp` over the rows of own experts and over those of borrowed ones; rows of no expert come back zero.

        Args:
            mlp: (rows, count, *stacks) -> rows, as `grouped_mlp`. Called once for the stacks given and, where anything was
                borrowed, once for stacks of what was.
            rows_RD, count: from `dispatch`.
            weights: own experts, (e, ...) each.

        A borrowed expert's gradient is summed at home in rank order: in fp32 into `main_grad` where a weight carries it (see
        `grouped_mlp/triton.py`; the borrowed stack's own fp32 buffer is made when backward asks for it), else in the weight's
        dtype. Collective, and so is the backward.
        """
        own, borrowed = weights[0].shape[0], self.loans.num_borrowed
        into = [_Away(borrowed, w) if getattr(w, "main_grad", None) is not None else None for w in weights]
        stacks = _Borrow.apply(self.loans, into, [getattr(w, "main_grad", None) for w in weights], *weights)
        for stack, away in zip(stacks, into):
            if away is not None:
                stack.main_grad = away
        mine, theirs = self.rows
        out = [mlp(rows_RD[:mine], count[:own], *weights)]
        if borrowed:
            out.append(mlp(rows_RD[mine : mine + theirs], count[own:], *stacks))
        out.append(rows_RD.new_zeros(rows_RD.shape[0] - mine - theirs, out[0].shape[1]))
        return _Tie.apply(torch.cat(out), *stacks)


class _Away:
    """fp32 gradients of a borrowed stack: called in backward, returns where to add them."""

    def __init__(self, num_borrowed: int, like: torch.Tensor):
        self.shape, self.device = (num_borrowed, *like.shape[1:]), like.device
        self.sum: torch.Tensor | None = None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self.sum is None:
            self.sum = torch.zeros(self.shape, dtype=torch.float32, device=self.device)
        return (self.sum,)

    def take(self) -> torch.Tensor:
        (total,), self.sum = self(), None
        return total


class _Tie(torch.autograd.Function):
    """out, depending on the borrowed stacks: their backward runs on a rank that borrowed nothing too, since others lent from it."""

    @staticmethod
    def forward(ctx, out, *stacks):
        ctx.num = len(stacks)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):
        return dout, *[None] * ctx.num


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loans: Loans, into, home, *weights):
        ctx.loans, ctx.into, ctx.home = loans, into, home
        ctx.like = [(w.shape, w.dtype, w.device) for w in weights]
        # None stands for a gradient that was added into a main_grad, or for nothing borrowed: no zeros are made of it.
        ctx.set_materialize_grads(False)
        return tuple(loans.bring(w) for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        loans, out = ctx.loans, []
        for dw, away, main_grad, (shape, dtype, device), wanted in zip(grads, ctx.into, ctx.home, ctx.like, ctx.needs_input_grad[3:]):
            if not wanted:
                out.append(None)
                continue
            # What travels depends on the weights alone, which all ranks hold alike, never on what was borrowed here.
            if away is not None:
                going = away.take()
                if dw is not None:  # a backend that knows no main_grad
                    going += dw
            else:
                going = torch.zeros((loans.num_borrowed, *shape[1:]), dtype=dtype, device=device) if dw is None else dw
            back = loans.send_home(going)
            if away is not None:
                for e, parts in back.items():
                    _add_to_run(main_grad, e, parts)
                out.append(None)
                continue
            home = torch.zeros(shape, dtype=dtype, device=device) if back else None
            for e, parts in back.items():
                total = parts[0].to(wide(dtype))
                for part in parts[1:]:
                    total = total + part
                home[e] = total
            out.append(home)
        return None, None, None, *out


def _add_to_run(main_grad, e: int, parts: list[torch.Tensor]) -> None:
    """Add to expert e of a main_grad that may lie in several runs."""
    main_grad = main_grad() if callable(main_grad) else main_grad
    for run in (main_grad,) if isinstance(main_grad, torch.Tensor) else main_grad:
        if e < run.shape[0]:
            for part in parts:
                run[e] += part
            return
        e -= run.shape[0]


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts, local: Callable = reference.dispatch):
    """See the contract in `megamoe.ops.moe_dispatch`; count is own experts', then those of the borrowed ones. Without a group: `local` alone.

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
    sent, received, mine, *borrowed = torch.cat([torch.stack([sent_P, received_P2e.sum(1), received_P2e[:, :own].sum(1)]), chosen.borrowed_Pe.long().T]).tolist()  # the one host sync
    index = _repeat(torch.arange(2 * own, device=x_ND.device).repeat(ranks), received_P2e.reshape(-1), sum(received))
    exchange = reference.Exchange(group, sent, received, torch.argsort(index, stable=True))
    handle.exchange = _Exchange(exchange, leaving_R)
    loans = Loans.of([list(line) for line in zip(*borrowed)], me, own, group)
    count = received_P2e[:, : own + loans.num_borrowed].sum(0).int()
    return handle.exchange.out(rows_RD), count, Handle(handle, loans, (sum(mine), sum(received) - sum(mine)))


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
