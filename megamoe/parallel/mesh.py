"""Who is where: one object with two views of the same ranks.

    dense   (pp, dp, cp, tp)    attention, dense FFN, embeddings, norms
    sparse  (pp, edp, ep)       experts, folded over the dp·cp·tp ranks of a pipeline stage

Rank r is row-major in the dense view, so tp neighbours are adjacent, then cp, then dp; ep groups are runs of adjacent
ranks of a stage. All groups are created once, by every rank, in the same order, with one time-out, and are handed
down as arguments: nothing below `train/` asks a global for its rank.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megamoe.parallel.config import ParallelConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Axis:
    """One group of ranks seen from this rank.

    Attributes:
        size, rank: ranks in the group, and this rank's place in it.
        ranks: global ranks, in group order.
        group: the process group; None when the axis has one rank, and then no collective is needed.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """Axes by name.

    Gradients are summed over `stage` where every rank of a pipeline stage holds the parameter, over `dp_cp` where it is
    cut over tp, over `edp` for experts, over `ends` for an embedding that the first and the last stage both hold.
    `model` is one full copy of the model. `channels` are the directed pipeline edges of this rank: (from, to, "F" or
    "B") with pipeline ranks, each a group of its own, so that no message waits behind one of another direction.
    """

    world: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    tp: Axis = field(default_factory=Axis)
    dp_cp: Axis = field(default_factory=Axis)
    ep: Axis = field(default_factory=Axis)
    edp: Axis = field(default_factory=Axis)
    model: Axis = field(default_factory=Axis)
    stage: Axis = field(default_factory=Axis)
    ends: Axis = field(default_factory=Axis)
    channels: dict[tuple[int, int, str], dist.ProcessGroup] = field(default_factory=dict)
    control: dist.ProcessGroup | None = None

    def __str__(self) -> str:
        dense = f"pp {self.pp.size} × dp {self.dp.size} × cp {self.cp.size} × tp {self.tp.size}"
        sparse = f"pp {self.pp.size} × edp {self.edp.size} × ep {self.ep.size}"
        return f"{self.world.size} rank{'s' * (self.world.size > 1)}: dense {dense}; experts {sparse}"


def rank_grids(config: ParallelConfig, world_size: int) -> dict[str, Sequence[torch.Tensor]]:
    """Rows of global ranks of every axis, int64: (groups, size), for `ends` a list of rows. Pure: needs no process group.

    Raises:
        UserError: a world size the layout does not fit.
    """
    dp = config.resolve_dp(world_size)
    pp, cp, tp, ep = config.pp, config.cp, config.tp, config.ep
    grid = torch.arange(world_size).view(pp, dp, cp, tp)
    stage = grid.reshape(pp, dp * cp * tp)
    dp_cp = grid.permute(0, 3, 1, 2).reshape(pp, tp, dp * cp)
    # Ranks of middle stages hold no embedding; rows of their own keep this a partition of the world.
    ends = [torch.cat([dp_cp[0, t], dp_cp[-1, t]]) if pp > 1 else dp_cp[0, t] for t in range(tp)]
    ends += [dp_cp[p, t] for p in range(1, pp - 1) for t in range(tp)]
    sparse = stage.view(pp, dp * cp * tp // ep, ep)
    return {
        "world": grid.reshape(1, -1),
        "pp": grid.permute(1, 2, 3, 0).reshape(-1, pp),
        "dp": grid.permute(0, 2, 3, 1).reshape(-1, dp),
        "cp": grid.permute(0, 1, 3, 2).reshape(-1, cp),
        "tp": grid.reshape(-1, tp),
        "dp_cp": dp_cp.reshape(-1, dp * cp),
        "ep": sparse.reshape(-1, ep),
        "edp": sparse.permute(0, 2, 1).reshape(-1, dp * cp * tp // ep),
        "model": grid.permute(1, 2, 0, 3).reshape(-1, pp * tp),
        "stage": stage,
        "ends": ends,
    }


def node_crossings(config: ParallelConfig, world_size: int, ranks_per_node: int) -> list[str]:
    """What leaves a node on this layout, one sentence an axis that should not: tp first, then cp and ep. Pure.

    Ranks are numbered so that tp stays on a node as long as it fits, then cp, then ep; pipeline and data parallelism cross
    nodes first, because they send least.
    """
    sentences = []
    for axis in ("tp", "cp", "ep"):
        rows = [[rank // ranks_per_node for rank in row.tolist()] for row in rank_grids(config, world_size)[axis]]
        # Of the traffic between two members of a group, spread evenly, the share whose ends lie on different nodes.
        pairs = sum(a != b for row in rows for a in row for b in row)
        total = sum(len(row) ** 2 for row in rows)
        if pairs:
            fits = [d for d in range(1, ranks_per_node + 1) if ranks_per_node % d == 0 and getattr(config, axis) % d == 0]
            sentences.append(f"parallel.{axis}={getattr(config, axis)}: groups cross nodes of {ranks_per_node} ranks, {pairs / total:.0%} of their traffic leaves the node; {axis}={max(fits)} would fit")
    return sentences


def build_mesh(config: ParallelConfig) -> Mesh:
    """Create every group of the layout and warm each one up.

    Collective over the world: every rank calls it once, after `init_process_group`. Axes with the same rows share a
    group. Without a process group (one process) every axis has size one.

    Raises:
        UserError: a world size the layout does not fit.
    """
    if not dist.is_initialized():
        rank_grids(config, 1)
        return Mesh()
    me, world_size = dist.get_rank(), dist.get_world_size()
    timeout = datetime.timedelta(seconds=config.timeout_s)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    axes = {}
    for name, rows in rank_grids(config, world_size).items():
        for row in (tuple(row.tolist()) for row in rows):
            if len(row) > 1 and row not in groups:
                groups[row] = dist.new_group(list(row), timeout=timeout)
            if me in row:
                axes[name] = Axis(len(row), row.index(me), row, groups.get(row))
    channels = {}
    for row in rank_grids(config, world_size)["pp"].tolist() if config.pp > 1 else []:
        # The way back from the last rank to the first exists for virtual stages only.
        for a in range(config.pp if config.vpp > 1 else config.pp - 1):
            b = (a + 1) % config.pp
            for edge in ((a, b, "F"), (b, a, "B")):
                group = dist.new_group(sorted([row[a], row[b]]), timeout=timeout)
                groups[(row[edge[0]], row[edge[1]], edge[2])] = group
                if me in (row[a], row[b]):
                    channels[edge] = group
    # Counters and stop flags travel here: a CPU group, so that reading them never waits for the device.
    control = None
    if world_size > 1:
        control = dist.new_group(list(range(world_size)), timeout=timeout, backend="gloo")
    mesh = Mesh(**axes, channels=channels, control=control)
    _warm_up(groups)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)))
    if me == 0:
        for sentence in node_crossings(config, world_size, ranks_per_node):
            log.warning("%s", sentence)
    return mesh


def _warm_up(groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
    """One tiny collective a group: connections are made here, in one order, and not inside the first step."""
    me = dist.get_rank()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for row, group in groups.items():
        if me in row:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
