"""Dispatch by sorting, `all_to_all_single` between ranks, combine by gathering in expert order.

The plan, from the ids alone: sort each token's slots by expert id, then all slots stably by expert. Row r of the sorted
order holds slot `slot_of_row[r]`, slot (n, a) sits in row `row_of_slot[n, a]`. Empty slots (-1) sort behind expert E-1.
Since every slot has exactly one row, dispatch and combine are gathers in both directions: no scatter-add, no atomics,
and the order of every sum is fixed by `a`, which is the order of expert ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.ops.collectives import all_to_all
from megamoe.ops.precision import wide


@dataclass
class Handle:
    """What `combine` needs: the plan, the weights in the plan's order, and the way back between ranks.

    Attributes:
        weight_NA: late weights, slots of a token in ascending expert id, zero in empty slots; in the autograd graph.
        row_of_slot_NA, slot_of_row_R: the two directions of the local permutation, R = N*A.
        exchange: None for one rank.
    """

    weight_NA: torch.Tensor
    row_of_slot_NA: torch.Tensor
    slot_of_row_R: torch.Tensor
    exchange: Exchange | None = None

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        if self.exchange is not None:
            out_RD = self.exchange.back(out_RD, self.slot_of_row_R.shape[0])
        return _WeightedSum.apply(out_RD, self.weight_NA, self.row_of_slot_NA, self.slot_of_row_R)


@dataclass
class Exchange:
    """Rows between ranks: blocks by destination out, regrouped by local expert there, and the way back.

    Attributes:
        sent, received: rows to and from each rank.
        arrival_R: (R,) for each row in local expert order, its place in arrival order (source rank, expert, token).
    """

    group: object
    sent: list[int]
    received: list[int]
    arrival_R: torch.Tensor

    def out(self, rows_RD: torch.Tensor) -> torch.Tensor:
        arrived = all_to_all(rows_RD[: sum(self.sent)], self.sent, self.received, self.group)
        return _Permute.apply(arrived, self.arrival_R)

    def back(self, out_RD: torch.Tensor, num_slots: int) -> torch.Tensor:
        home = all_to_all(_Permute.apply(out_RD, torch.argsort(self.arrival_R)), self.received, self.sent, self.group)
        empty = num_slots - home.shape[0]
        return torch.cat([home, home.new_zeros(empty, home.shape[1])]) if empty else home


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts):
    """See the contract in `megamoe.ops.moe_dispatch`."""
    N, A = topk_idx_NA.shape
    id_NA = torch.where(topk_idx_NA < 0, num_experts, topk_idx_NA)
    id_NA, by_expert_NA = id_NA.sort(dim=1, stable=True)
    filled_NA = id_NA < num_experts
    weight_NA = topk_weight_NA.gather(1, by_expert_NA) * filled_NA
    slot_of_row_R = torch.argsort(id_NA.reshape(-1), stable=True)
    row_of_slot_NA = torch.empty_like(slot_of_row_R)
    row_of_slot_NA[slot_of_row_R] = torch.arange(N * A, device=x_ND.device)
    row_of_slot_NA = row_of_slot_NA.view(N, A)
    count_E = torch.zeros(num_experts + 1, dtype=torch.int32, device=x_ND.device)
    count_E = count_E.scatter_add_(0, id_NA.reshape(-1), torch.ones_like(slot_of_row_R, dtype=torch.int32))[:num_experts]
    rows_RD = _Gather.apply(x_ND, slot_of_row_R, row_of_slot_NA, filled_NA)
    handle = Handle(weight_NA, row_of_slot_NA, slot_of_row_R)
    if group is None:
        return rows_RD, count_E, handle
    handle.exchange, count_e = _plan_exchange(count_E, group)
    return handle.exchange.out(rows_RD), count_e, handle


def _plan_exchange(count_E: torch.Tensor, group) -> tuple[Exchange, torch.Tensor]:
    """Tell every rank how many rows come to each of its experts, and where they will arrive. The one host sync."""
    ranks = dist.get_world_size(group)
    sent_Pe = count_E.view(ranks, -1)
    received_Pe = torch.empty_like(sent_Pe)
    dist.all_to_all_single(received_Pe, sent_Pe.contiguous(), group=group)
    sent, received = torch.stack([sent_Pe.sum(1), received_Pe.sum(1)]).tolist()
    expert_of_arrival = torch.arange(received_Pe.shape[1], device=count_E.device).repeat(ranks)
    expert_of_arrival = expert_of_arrival.repeat_interleave(received_Pe.reshape(-1).long(), output_size=sum(received))
    arrival_R = torch.argsort(expert_of_arrival, stable=True)
    return Exchange(group, sent, received, arrival_R), received_Pe.sum(0, dtype=torch.int32)


def _gather_sum(rows_RD, row_of_slot_NA, weight_NA):
    """sum_a weight[n, a] * rows[row_of_slot[n, a]] with a ascending, in the wide dtype. (N, D)."""
    dtype = wide(rows_RD.dtype)
    out_ND = torch.zeros(row_of_slot_NA.shape[0], rows_RD.shape[1], dtype=dtype, device=rows_RD.device)
    for a in range(row_of_slot_NA.shape[1]):
        out_ND.addcmul_(rows_RD.index_select(0, row_of_slot_NA[:, a]).to(dtype), weight_NA[:, a, None].to(dtype))
    return out_ND


class _Gather(torch.autograd.Function):
    """Token n's row into each of its slots; empty slots get zero."""

    @staticmethod
    def forward(ctx, x_ND, slot_of_row_R, row_of_slot_NA, filled_NA):
        ctx.save_for_backward(row_of_slot_NA, filled_NA)
        A = row_of_slot_NA.shape[1]
        rows_RD = x_ND.index_select(0, slot_of_row_R // A)
        return rows_RD.mul_(filled_NA.reshape(-1)[slot_of_row_R][:, None])

    @staticmethod
    def backward(ctx, drows_RD):
        row_of_slot_NA, filled_NA = ctx.saved_tensors
        return _gather_sum(drows_RD, row_of_slot_NA, filled_NA).to(drows_RD.dtype), None, None, None


class _WeightedSum(torch.autograd.Function):
    """Late weights: y[n] = sum_a weight[n, a] out[row of (n, a)]."""

    @staticmethod
    def forward(ctx, out_RD, weight_NA, row_of_slot_NA, slot_of_row_R):
        ctx.save_for_backward(out_RD, weight_NA, row_of_slot_NA, slot_of_row_R)
        return _gather_sum(out_RD, row_of_slot_NA, weight_NA).to(out_RD.dtype)

    @staticmethod
    def backward(ctx, dy_ND):
        out_RD, weight_NA, row_of_slot_NA, slot_of_row_R = ctx.saved_tensors
        dtype, A = wide(out_RD.dtype), weight_NA.shape[1]
        dy_RD = dy_ND.index_select(0, slot_of_row_R // A).to(dtype)
        dweight_R = (out_RD.to(dtype) * dy_RD).sum(-1)
        dout_RD = dy_RD.mul_(weight_NA.reshape(-1)[slot_of_row_R][:, None].to(dtype)).to(out_RD.dtype)
        return dout_RD, dweight_R[row_of_slot_NA].to(weight_NA.dtype), None, None


class _Permute(torch.autograd.Function):
    """x[order] for a permutation: the backward is the inverse gather, not a scatter-add."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, dx):
        (order,) = ctx.saved_tensors
        return dx.index_select(0, torch.argsort(order)), None
