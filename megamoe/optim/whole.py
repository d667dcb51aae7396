"""Newton–Schulz of matrices whose slices lie on different tensor-parallel ranks.

Orthogonalising a slice is not the slice of the orthogonalised matrix. Ranks at the same place of their own reduction axes
own the slices of the same matrices; they share the matrices out among themselves, balanced by cost:

    slices → all_to_all → whole matrices, each on one of the tp ranks → rule → all_to_all → slices of the update
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megamoe.parallel.mesh import Axis


def cut_dim(info, p: torch.Tensor) -> int | None:
    """The dim along which a matrix that is orthogonalised whole is cut, or None: blocks lie whole on their ranks."""
    if info.muon_blocks is not None or info.is_expert or tuple(p.shape) == tuple(info.global_shape):
        return None
    return next(d for d, (here, whole) in enumerate(zip(p.shape, info.global_shape)) if here != whole)


def on_whole_matrices(slices: list[torch.Tensor], dims: list[int], rule: Callable[[torch.Tensor], torch.Tensor], tp: Axis) -> list[torch.Tensor]:
    """Apply `rule` to matrices given as slices.

    Args:
        slices: (rows, cols) each, the slices of the same matrices in the same order on every rank of `tp`.
        dims: the dim each is cut along, in tp order.
        rule: (1, rows, cols) of a whole matrix to the same shape.

    Returns: this rank's slice of each result, as (1, rows, cols). Collective over tp.
    """
    if not slices:
        return []
    load, owner = [0] * tp.size, []
    for s in slices:
        rank = load.index(min(load))
        small, large = sorted(s.shape)
        load[rank] += small * small * large
        owner.append(rank)
    order = sorted(range(len(slices)), key=lambda i: (owner[i], i))
    send = [sum(slices[i].numel() for i in order if owner[i] == r) for r in range(tp.size)]
    mine = [i for i in order if owner[i] == tp.rank]
    receive = [sum(slices[i].numel() for i in mine)] * tp.size
    arrived = _exchange(torch.cat([slices[i].reshape(-1) for i in order]), send, receive, tp)
    parts = [dict(zip(mine, block.split([slices[i].numel() for i in mine]))) for block in arrived.split(receive)]
    updates = [rule(torch.cat([parts[r][i].view_as(slices[i]) for r in range(tp.size)], dims[i]).unsqueeze(0))[0] for i in mine]
    chunks = {i: update.chunk(tp.size, dims[i]) for i, update in zip(mine, updates)}
    back = [chunks[i][r].reshape(-1) for r in range(tp.size) for i in mine]
    home = _exchange(torch.cat(back) if back else arrived[:0], receive, send, tp)
    result = dict(zip(order, home.split([slices[i].numel() for i in order])))
    return [result[i].view_as(s).unsqueeze(0) for i, s in enumerate(slices)]


def _exchange(x: torch.Tensor, send: list[int], receive: list[int], tp: Axis) -> torch.Tensor:
    if tp.group is None:
        return x
    out = x.new_empty(sum(receive))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=tp.group)
    return out
