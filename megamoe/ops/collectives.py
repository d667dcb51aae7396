"""Differentiable collectives over an explicit group. `None` is a group of one: nothing is sent.

The backward of each is the collective that moves gradients back the way the values came. Sums are never averaged.

    all_gather       ⟷ reduce_scatter      slices of a tensor ⟷ each rank's partial sum of the whole
    copy_to          → all_reduce          one value used by every rank: its gradient is the sum of theirs
    reduce_from      ← identity            every rank gets the sum, and uses it in the same way
    all_to_all       ⟷ all_to_all          rows change places
    halo             ⟷ halo backwards      the rows in front of mine

Every function is collective over its group, in forward and in backward: ranks call them in the same order, also with
nothing to send. Reductions add in the order of ranks within a torch collective: the result is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megamoe.utils.torch_compat import all_gather_single, reduce_scatter_single


def all_gather(x: torch.Tensor, group, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Concatenate x of all ranks along dim 0, in rank order. Backward: reduce_scatter.

    Args:
        x: (n, ...).
        sizes: n of every rank; None means all have this rank's.

    Every rank's gradient of the whole is a partial one: they are summed.
    """
    if group is None:
        return x
    return _AllGather.apply(x, group, _sizes(x.shape[0], group, sizes))


def reduce_scatter(x: torch.Tensor, group, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum x over all ranks and keep this rank's slice of dim 0. Backward: all_gather.

    Args:
        x: (sum of sizes, ...), the same shape everywhere.
        sizes: rows each rank keeps; None means equal slices.

    Raises:
        ValueError: equal slices of a length that the group's size does not divide.
    """
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    if sizes is None and x.shape[0] % ranks:
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows do not divide over {ranks} ranks; pass sizes, or use a multiple of {ranks}")
    return _ReduceScatter.apply(x, group, _sizes(x.shape[0] // ranks, group, sizes))


def copy_to(x: torch.Tensor, group) -> torch.Tensor:
    """x, which all ranks hold alike and use each for a part of the work. Backward: all_reduce."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: torch.Tensor, group) -> torch.Tensor:
    """Sum of x over all ranks, for a use that is the same on every rank. Backward: identity."""
    return x if group is None else _ReduceFrom.apply(x, group)


def all_to_all(x: torch.Tensor, send_splits: list[int], recv_splits: list[int], group) -> torch.Tensor:
    """Send consecutive row blocks of x to the ranks of `group` in order; concatenate what arrives, in rank order.

    Args:
        x: (sum(send_splits), ...) contiguous or not. Rows i go to rank r when they fall in r's block.
        send_splits, recv_splits: rows to and from each rank; rank a's send_splits[b] is rank b's recv_splits[a].

    Returns: (sum(recv_splits), ...).

    Collective: every rank of `group`, also with zero rows; the backward is one too.
    """
    if group is None:
        return x
    return _AllToAll.apply(x, send_splits, recv_splits, group)


def halo(x: torch.Tensor, rows: int, group) -> torch.Tensor:
    """The last `rows` rows of the rank in front of this one; zeros on the first rank.

    Args:
        x: (n, ...) with n >= rows, contiguous slices of one tensor in rank order.

    Returns: (rows, ...). Backward: the gradient goes to the rank in front.

    One small all_gather: on every fabric a single latency, and no pairing of sends and receives to get wrong.

    Raises:
        ValueError: fewer rows here than the halo is wide.
    """
    if x.shape[0] < rows:
        raise ValueError(f"halo: {x.shape[0]} rows on this rank are fewer than the {rows} its neighbour needs; use longer slices or fewer ranks")
    if group is None:
        return x.new_zeros(rows, *x.shape[1:])
    tails = all_gather(x[x.shape[0] - rows :], group)
    rank = dist.get_rank(group)
    # The first rank reads its own tail times zero, so that its backward takes part in the collective.
    return tails[: rows] * 0 if rank == 0 else tails[(rank - 1) * rows : rank * rows]


def _sizes(mine: int, group, sizes: Sequence[int] | None) -> list[int]:
    return [mine] * dist.get_world_size(group) if sizes is None else list(sizes)


def _gather(x: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    x = x.contiguous()
    if len(set(sizes)) == 1:
        out = x.new_empty(sum(sizes), *x.shape[1:])
        all_gather_single(out, x, group=group)
        return out
    # Uneven slices: padded to the longest. gloo and NCCL gather equal blocks only.
    longest = max(sizes)
    padded = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
    blocks = _gather(padded, group, [longest] * len(sizes))
    return torch.cat([block[:size] for block, size in zip(blocks.split(longest), sizes)])


def _scatter_sum(x: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    rank = dist.get_rank(group)
    if len(set(sizes)) == 1:
        out = x.new_empty(sizes[rank], *x.shape[1:])
        reduce_scatter_single(out, x.contiguous(), group=group)
        return out
    longest = max(sizes)
    padded = torch.cat([torch.cat([block, block.new_zeros(longest - block.shape[0], *block.shape[1:])]) for block in x.split(sizes)])
    return _scatter_sum(padded, group, [longest] * len(sizes))[: sizes[rank]]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.route = (group, sizes)
        return _gather(x, group, sizes)

    @staticmethod
    def backward(ctx, dout):
        return _ReduceScatter.apply(dout, *ctx.route), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.route = (group, sizes)
        return _scatter_sum(x, group, sizes)

    @staticmethod
    def backward(ctx, dout):
        return _AllGather.apply(dout, *ctx.route), None, None


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        dx = dout.contiguous().clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        out = x.contiguous().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, dout):
        return dout, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send_splits, recv_splits, group):
        ctx.route = (recv_splits, send_splits, group)
        out = x.new_empty(sum(recv_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv_splits, send_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, dout):
        send_splits, recv_splits, group = ctx.route
        return _AllToAll.apply(dout, send_splits, recv_splits, group), None, None, None
