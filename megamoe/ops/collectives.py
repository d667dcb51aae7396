"""Differentiable collectives over an explicit group. `None` is a group of one: nothing is sent.

The backward of each is the collective that moves gradients back the way the values came. Sums are never averaged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


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
