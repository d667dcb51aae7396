"""Per-head Muon with one owner per block: the update does not depend on the layout.

A *unit* is a run of whole blocks of one parameter: head blocks of a projection, experts of a stack, or the whole
matrix. Every unit has one owner among the ranks that share its gradient. The owner receives the summed fp32 gradient,
holds momentum and the fp32 master, orthogonalises whole blocks, and sends the new weights back:

    micro-batch   buffer += grad                          (fp32, hook on each parameter; grad is freed at once; experts' products
                                                           add into it themselves where their backend can: `main_grad`)
    reduce        reduce_scatter(buffer)                  each owner gets its units
    step          momentum, Newton–Schulz, master, weights → all_gather

A matrix that is cut over tensor-parallel ranks is owned slice by slice; for Newton–Schulz the owners of its slices put it
together at one of them (`optim/whole.py`), so that the update is that of the whole matrix.

Rules (arXiv:2502.16982; per-head blocks as in the K3 report): M ← μM + G; U = NS(G + μM);
W ← W − lr·(0.2·sqrt(max(rows, cols))·U + wd·W), with rows and cols of the block. Gradients are clipped before M.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megamoe.optim.newton_schulz import newton_schulz
from megamoe.optim.whole import cut_dim, on_whole_matrices
from megamoe.parallel.engine import RowFactors, StateFragment
from megamoe.parallel.mesh import Axis
from megamoe.utils.torch_compat import all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class Unit:
    """Blocks `[start, stop)` of parameter `index`, stored at `offset` of its owner's part of the flat buffer."""

    index: int
    start: int
    stop: int
    owner: int
    offset: int


@dataclass(frozen=True)
class Blocks:
    """How a parameter falls into matrices: a view (count, rows, cols) whose leading dim is contiguous in memory."""

    count: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Multiply-adds of one Newton–Schulz iteration on one block."""
        small, large = sorted((self.rows, self.cols))
        return 2 * small * small * large + small**3


def plan_units(blocks: list[Blocks], num_owners: int) -> list[Unit]:
    """Give every block to one owner, balanced by Newton–Schulz cost. A pure function: each rank computes the same plan.

    Parameters with several blocks are cut so that no unit costs more than a quarter of an owner's fair share; units
    then go, dearest first, to the owner with the least so far.
    """
    fair = max(1, sum(b.count * b.cost for b in blocks) // (4 * num_owners))
    pieces = []
    for index, b in enumerate(blocks):
        per_unit = b.count if num_owners == 1 else min(b.count, max(1, fair // b.cost))
        pieces += [(b.cost * (min(start + per_unit, b.count) - start), index, start, min(start + per_unit, b.count)) for start in range(0, b.count, per_unit)]
    load, filled, units = [0] * num_owners, [0] * num_owners, []
    for cost, index, start, stop in sorted(pieces, key=lambda p: (-p[0], p[1], p[2])):
        owner = load.index(min(load))
        units.append(Unit(index, start, stop, owner, filled[owner]))
        load[owner] += cost
        filled[owner] += (stop - start) * blocks[index].numel
    return units


class Muon:
    """Muon over parameters whose gradients are summed over one axis.

    Args:
        params: the parameters; each carries `p.megamoe` (ParamInfo) with its block shape and weight-decay flag.
        axis: ranks that hold the same slices and a part of their gradient each (see `ParamInfo.reduce_axis`).
        tp: ranks that hold the other slices of cut matrices, at the same place in their own axes.
        momentum, ns_steps: see `OptimConfig`.
        weight_decay: applied where the parameter's record says so.
        ns_dtype: dtype of the Newton–Schulz products; None keeps the master's.

    Construction registers a hook on every parameter, so exactly one Muon may hold a parameter.
    """

    def __init__(self, params: list[nn.Parameter], axis: Axis, tp: Axis = Axis(), *, momentum: float, ns_steps: int, weight_decay: float, ns_dtype: torch.dtype | None = None):
        self.params, self.axis, self.tp = params, axis, tp
        self.momentum, self.ns_steps, self.weight_decay, self.ns_dtype = momentum, ns_steps, weight_decay, ns_dtype
        self.blocks = [Blocks(*p.megamoe.muon_view(p)) for p in params]
        self.cut_dim = [cut_dim(p.megamoe, p) for p in params]
        self.units = plan_units(self.blocks, axis.size)
        self.mine = [u for u in self.units if u.owner == axis.rank]
        share = [sum((u.stop - u.start) * self.blocks[u.index].numel for u in self.units if u.owner == o) for o in range(axis.size)]
        self.part_numel = max(share, default=0)
        device = params[0].device if params else torch.device("cpu")
        self.state_dtype = torch.float64 if params and params[0].dtype == torch.float64 else torch.float32
        self.grad_flat = torch.zeros(axis.size * self.part_numel, dtype=self.state_dtype, device=device)
        self.grad_part = self.grad_flat.narrow(0, axis.rank * self.part_numel, self.part_numel)
        self.momentum_flat = torch.zeros(self.part_numel, dtype=self.state_dtype, device=device)
        self.master_flat = torch.zeros(self.part_numel, dtype=self.state_dtype, device=device)
        for u in self.mine:
            self._view(self.master_flat, u).copy_(self._weight(u))
        by_param = defaultdict(list)
        for u in self.units:
            by_param[u.index].append(u)
        for index, p in enumerate(params):
            p.register_post_accumulate_grad_hook(self._accumulate(by_param[index]))
            self._offer_main_grad(p, by_param[index])

    def _offer_main_grad(self, p: nn.Parameter, units: list[Unit]) -> None:
        """Where `grouped_mlp` may add a stack of experts' gradients itself, in fp32; the hook then sees none of them.

        Without it a gradient is written in bf16, read again, and added here: rounded once more, and 8 bytes a weight more.
        """
        runs = tuple(self._view(self.grad_flat.narrow(0, u.owner * self.part_numel, self.part_numel), u) for u in sorted(units, key=lambda u: u.start))
        # The copy engine adds in 16-byte pieces: rows and starts must lie on them.
        if p.megamoe.is_expert and self.state_dtype == torch.float32 and all(r.data_ptr() % 16 == 0 and r.shape[-1] % 4 == 0 for r in runs):
            p.main_grad = runs

    def _view(self, flat: torch.Tensor, u: Unit) -> torch.Tensor:
        b = self.blocks[u.index]
        return flat.narrow(0, u.offset, (u.stop - u.start) * b.numel).view(u.stop - u.start, b.rows, b.cols)

    def _weight(self, u: Unit) -> torch.Tensor:
        b = self.blocks[u.index]
        return self.params[u.index].data.view(b.count, b.rows, b.cols)[u.start : u.stop]

    def _accumulate(self, units: list[Unit]):
        def hook(p: nn.Parameter) -> None:
            b = self.blocks[units[0].index]
            grad = p.grad.view(b.count, b.rows, b.cols)
            for u in units:
                self._view(self.grad_flat.narrow(0, u.owner * self.part_numel, self.part_numel), u).add_(grad[u.start : u.stop])
            p.grad = None

        return hook

    def reduce(self) -> None:
        """Sum each unit's gradient at its owner. Collective over the axis."""
        if self.axis.group is None or not self.part_numel:
            return
        out = torch.empty_like(self.grad_part)
        reduce_scatter_single(out, self.grad_flat, group=self.axis.group)
        self.grad_part.copy_(out)

    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of the summed gradients owned here, float64 scalar; its sum over the world counts each once."""
        total = torch.zeros((), dtype=torch.float64, device=self.grad_flat.device)
        for u in self.mine:
            total += self._view(self.grad_part, u).double().square().sum()
        return total

    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, int, torch.Tensor]]:
        """(parameter, first element, values) of every summed gradient owned here, flat. For proofs."""
        for u in self.mine:
            yield self.params[u.index], u.start * self.blocks[u.index].numel, self._view(self.grad_part, u).reshape(-1)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor, row_factors: RowFactors | None = None) -> None:
        """Update owned units from `grad_scale`·gradient and give every rank the new weights. Collective.

        row_factors: (rows,) by parameter, applied to the updated masters before weights are made from them.
        """
        self.grad_part.mul_(grad_scale.to(self.state_dtype))
        self.momentum_flat.mul_(self.momentum).add_(self.grad_part)
        by_shape = defaultdict(list)
        for u in self.mine:
            b = self.blocks[u.index]
            if self.cut_dim[u.index] is None:
                by_shape[(b.rows, b.cols)].append(u)
        cut = [u for u in self.mine if self.cut_dim[u.index] is not None]
        for units in by_shape.values():
            update = self._rule(torch.cat([self._nesterov(u) for u in units]))
            self._apply(lr, units, update.split([u.stop - u.start for u in units]))
        self._apply(lr, cut, on_whole_matrices([self._nesterov(u)[0] for u in cut], [self.cut_dim[u.index] for u in cut], self._rule, self.tp))
        self._scale_rows(row_factors or {})
        self.publish()
        self.discard()

    def _nesterov(self, u: Unit) -> torch.Tensor:
        return self._view(self.grad_part, u).add(self._view(self.momentum_flat, u), alpha=self.momentum)

    def _rule(self, g_nrc: torch.Tensor) -> torch.Tensor:
        """Whole matrices to whole updates, before the learning rate."""
        scale = 0.2 * max(g_nrc.shape[1:]) ** 0.5
        return newton_schulz(g_nrc, steps=self.ns_steps, dtype=self.ns_dtype) * scale

    def _apply(self, lr: float, units: list[Unit], updates: Sequence[torch.Tensor]) -> None:
        for u, update in zip(units, updates, strict=True):
            master = self._view(self.master_flat, u)
            if self.params[u.index].megamoe.weight_decay:
                master.mul_(1 - lr * self.weight_decay)
            master.add_(update, alpha=-lr)

    def _scale_rows(self, row_factors: RowFactors) -> None:
        for u in self.mine:
            factor_R = row_factors.get(self.params[u.index])
            if factor_R is not None:
                rows = self.blocks[u.index].rows
                self._view(self.master_flat, u).mul_(factor_R.to(self.state_dtype).view(-1, rows, 1)[u.start : u.stop])

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the parameters of every rank, in the parameters' dtype. Collective."""
        if not self.params:
            return
        dtype = self.params[0].dtype
        part = self.master_flat.to(dtype)
        whole = part
        if self.axis.group is not None:
            whole = torch.empty(self.axis.size * self.part_numel, dtype=dtype, device=part.device)
            all_gather_single(whole, part, group=self.axis.group)
        for u in self.units:
            self._weight(u).copy_(self._view(whole.narrow(0, u.owner * self.part_numel, self.part_numel), u))

    def discard(self) -> None:
        """Drop the gradients of this step."""
        self.grad_flat.zero_()

    def state_fragments(self) -> Iterator[StateFragment]:
        """Momentum and master of every unit owned here.

        Whoever fills masters fills the parameters on every rank too: weights are made from masters in `step` only.
        """
        for u in self.mine:
            p, first = self.params[u.index], u.start * self.blocks[u.index].numel
            for key, flat in (("momentum", self.momentum_flat), ("master", self.master_flat)):
                yield StateFragment(p, key, first, self._view(flat, u).view(-1))
