"""One optimizer made of several: AdamW inside engines, Muon beside them, one norm and one clip over all.

Parameters are grouped by the axis over which their gradient is summed (`ParamInfo.reduce_axis`): what every rank of a
stage holds, what is cut over tp, experts, an embedding at both ends of a pipeline. Each group has an engine and a Muon of
its own. Axes with the same ranks are one: without tensor, expert and pipeline parallelism there is one of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megamoe.optim.config import OptimConfig, OptimizerKind
from megamoe.optim.muon import Muon
from megamoe.optim.qk_clip import QKClip
from megamoe.parallel.engine import DeepSpeedEngine, ParamGroups, PlainEngine, StateFragment
from megamoe.parallel.mesh import Axis, Mesh
from megamoe.utils.features import fused_adamw

# Every value of `ParamInfo.reduce_axis`, in the order in which they are reduced.
REDUCE_AXES = ("stage", "dp_cp", "edp", "ends")


@dataclass(frozen=True)
class Update:
    """What one step did: the global gradient norm before clipping, and whether it was skipped as non-finite."""

    grad_norm: float
    skipped: bool


class Optimizer:
    """Muon for matrices, AdamW (or SGD, in proofs) for the rest; results do not depend on the layout.

    All sides deliver summed gradients and their share of the norm's square; the shares of all sides and ranks sum to the
    square, each slice of each parameter counted once. One factor min(1, clip / norm) goes to all sides before any moves a
    weight.

    Args:
        sides: in an order that is the same on all ranks, because each reduces over a group of its own.
        world: all ranks.
        qk_clip: scales rows of updated masters, on every side; None is off.
    """

    def __init__(self, engines: dict[str, PlainEngine | DeepSpeedEngine], muons: dict[str, Muon], clip_norm: float, world: Axis, qk_clip: QKClip | None = None):
        self.engines, self.muons, self.clip_norm, self.world, self.qk_clip = engines, muons, clip_norm, world, qk_clip
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.sides = {f"engine.{k}": v for k, v in engines.items()} | {f"muon.{k}": v for k, v in muons.items()}

    def begin_step(self, step: int) -> None:
        """Say before the step's first forward which one this is, 0-based. Without it every step counts as the first."""
        if self.qk_clip:
            self.qk_clip.begin_step(step)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Context of exactly one backward."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines.values():
                stack.enter_context(engine.micro_batch())
            yield

    def reduce(self) -> torch.Tensor:
        """Sum the gradients of all sides; returns their global norm, float64 scalar on the device. Collective."""
        for name, side in self.sides.items():
            self.on_phase(f"reduction of gradients, {name}")
            side.reduce()
        self.on_phase("gradient norm")
        square = torch.stack([side.squared_norm() for side in self.sides.values()]).sum()
        if self.world.group is not None:
            dist.all_reduce(square, group=self.world.group)
        return square.sqrt()

    def step(self, lr: float) -> Update:
        """Reduce, clip and update. Collective; syncs the host once, for the norm (a non-finite one skips the step)."""
        return self.apply(lr, self.reduce())

    def apply(self, lr: float, norm: torch.Tensor) -> Update:
        """The second half of `step`: clip the reduced gradients and move the weights. Collective; syncs the host."""
        value = norm.item()
        if value != value or value == float("inf"):
            for side in self.sides.values():
                side.discard()
            if self.qk_clip:
                self.qk_clip.end_step()
            return Update(value, skipped=True)
        scale = torch.ones_like(norm)
        if self.clip_norm > 0:
            scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        row_factors = {}
        if self.qk_clip:
            self.on_phase("QK-clip: maxima of the logits")
            row_factors = self.qk_clip.row_factors()
            self.qk_clip.end_step()
        for name, side in self.sides.items():
            self.on_phase(f"update of weights, {name}")
            side.step(lr, scale, row_factors)
        return Update(value, skipped=False)

    def state_fragments(self) -> Iterator[StateFragment]:
        """Every piece of optimizer state on this rank, live. No collective."""
        for side in self.sides.values():
            yield from side.state_fragments()

    def adam_step(self) -> int | None:
        """AdamW's own step count, the same on every side and rank; None where there is no state yet. May sync the host."""
        return next((step for engine in self.engines.values() if (step := engine.adam_step()) is not None), None)

    def create_state(self, adam_step: int | None) -> None:
        """Make AdamW's state as after so many steps, zero, for `state_fragments` to be filled. None leaves it to the first step."""
        for engine in self.engines.values() if adam_step is not None else ():
            engine.create_state(adam_step)


def split_parameters(params: list[nn.Parameter], kind: OptimizerKind, weight_decay: float) -> tuple[ParamGroups, list[nn.Parameter]]:
    """Sort parameters into the engine's groups (one per dtype and decay) and Muon's list, by their own records."""
    muon = [p for p in params if kind is OptimizerKind.muon and p.megamoe.optimizer == "muon"]
    taken = {id(p) for p in muon}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for p in params:
        if id(p) not in taken:
            groups.setdefault((str(p.dtype), p.megamoe.weight_decay), []).append(p)
    return [{"params": ps, "weight_decay": weight_decay if decay else 0.0} for (_, decay), ps in sorted(groups.items())], muon


def torch_optimizer(config: OptimConfig, device: torch.device) -> Callable[[ParamGroups], torch.optim.Optimizer]:
    """Constructor of the optimizer for the engine's groups: the best AdamW found on the device, or SGD without momentum and decay."""
    if config.kind is OptimizerKind.sgd:
        return lambda groups: torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=config.lr)
    adamw = fused_adamw(device.type).build
    return lambda groups: adamw(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)


def build_optimizer(model: nn.Module, config: OptimConfig, mesh: Mesh, *, deepspeed: bool, bucket_elements: int) -> Optimizer:
    """Wire the model's parameters to an engine and to Muon.

    Args:
        model: parameters in their compute dtype, each with a `p.megamoe` record, on their device.
        deepspeed: `DeepSpeedEngine`, else `PlainEngine`.

    Collective over the world.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    device = params[0].device
    make = torch_optimizer(config, device)
    bf16 = any(p.dtype == torch.bfloat16 for p in params)
    ns_dtype = torch.bfloat16 if bf16 and device.type == "cuda" else None
    engines, muons = {}, {}
    for name, (axis, members) in by_axis(params, mesh).items():
        groups, matrices = split_parameters(members, config.kind, config.weight_decay)
        if groups and deepspeed:
            engines[name] = DeepSpeedEngine(groups, make, axis, bf16=bf16, bucket_elements=bucket_elements)
        elif groups:
            engines[name] = PlainEngine(groups, make, axis)
        if matrices:
            muons[name] = Muon(matrices, axis, mesh.tp, momentum=config.muon_momentum, ns_steps=config.muon_ns_steps, weight_decay=config.weight_decay, ns_dtype=ns_dtype)
    qk_clip = QKClip(model, config.qk_clip, mesh) if config.qk_clip.tau > 0 else None
    return Optimizer(engines, muons, config.clip_norm, mesh.world, qk_clip)


def by_axis(params: list[nn.Parameter], mesh: Mesh) -> dict[str, tuple[Axis, list[nn.Parameter]]]:
    """Parameters by the ranks that sum their gradients: name of the axis -> (axis, parameters). Axes of the same ranks are one.

    The order is the same on every rank, whatever its stage holds: reductions of groups that overlap must not cross.
    """
    merged: dict[tuple[int, ...], tuple[str, Axis, list[nn.Parameter]]] = {}
    for name in REDUCE_AXES:
        axis = getattr(mesh, name)
        merged.setdefault(axis.ranks, (name, axis, []))
    for p in params:
        merged[getattr(mesh, p.megamoe.reduce_axis).ranks][2].append(p)
    return {name: (axis, members) for name, axis, members in merged.values() if members}
