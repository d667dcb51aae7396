"""One optimizer made of two: AdamW inside the engine, Muon beside it, one norm and one clip over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megamoe.optim.config import OptimConfig, OptimizerKind
from megamoe.optim.muon import Muon
from megamoe.parallel.engine import DeepSpeedEngine, ParamGroups, PlainEngine
from megamoe.parallel.mesh import Mesh


@dataclass(frozen=True)
class Update:
    """What one step did: the global gradient norm before clipping, and whether it was skipped as non-finite."""

    grad_norm: float
    skipped: bool


class Optimizer:
    """Muon for matrices, AdamW (or SGD, in proofs) for the rest; results do not depend on the layout.

    Both sides deliver summed gradients, so norm = sqrt(theirs² + ours²), and one factor min(1, clip / norm) goes to
    both before either moves a weight.
    """

    def __init__(self, engine: PlainEngine | DeepSpeedEngine, muons: list[Muon], clip_norm: float):
        self.engine, self.muons, self.clip_norm = engine, muons, clip_norm

    def micro_batch(self):
        """Context of exactly one backward."""
        return self.engine.micro_batch()

    def step(self, lr: float) -> Update:
        """Reduce, clip and update. Collective; syncs the host once, for the norm (a non-finite one skips the step)."""
        sides = [self.engine, *self.muons]
        for side in sides:
            side.reduce()
        norm = torch.stack([side.squared_norm() for side in sides]).sum().sqrt()
        value = norm.item()
        if value != value or value == float("inf"):
            for side in sides:
                side.discard()
            return Update(value, skipped=True)
        scale = torch.ones_like(norm)
        if self.clip_norm > 0:
            scale = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for side in sides:
            side.step(lr, scale)
        return Update(value, skipped=False)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Every live state tensor of this rank, by a name that is stable on one layout."""
        state = {f"engine.{k}": v for k, v in self.engine.state_tensors().items()}
        for i, muon in enumerate(self.muons):
            state |= {f"muon{i}.{k}": v for k, v in muon.state_tensors().items()}
        return state

    def load_state_tensors(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of `state_tensors` on the same layout. Collective."""
        for prefix, side in [("engine.", self.engine), *((f"muon{i}.", m) for i, m in enumerate(self.muons))]:
            side.load_state_tensors({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})


def split_parameters(params: list[nn.Parameter], kind: OptimizerKind, weight_decay: float) -> tuple[ParamGroups, list[nn.Parameter]]:
    """Sort parameters into the engine's groups (one per dtype and decay) and Muon's list, by their own records."""
    muon = [p for p in params if kind is OptimizerKind.muon and p.megamoe.optimizer == "muon"]
    taken = {id(p) for p in muon}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for p in params:
        if id(p) not in taken:
            groups.setdefault((str(p.dtype), p.megamoe.weight_decay), []).append(p)
    return [{"params": ps, "weight_decay": weight_decay if decay else 0.0} for (_, decay), ps in sorted(groups.items())], muon


def torch_optimizer(config: OptimConfig, *, fused: bool) -> Callable[[ParamGroups], torch.optim.Optimizer]:
    """Constructor of the torch optimizer for the engine's groups. `sgd` has neither momentum nor decay."""
    if config.kind is OptimizerKind.sgd:
        return lambda groups: torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=config.lr)
    return lambda groups: torch.optim.AdamW(groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=fused)


def build_optimizer(model: nn.Module, config: OptimConfig, mesh: Mesh, *, deepspeed: bool, bucket_elements: int) -> Optimizer:
    """Wire the model's parameters to an engine and to Muon.

    Args:
        model: parameters in their compute dtype, each with a `p.megamoe` record, on their device.
        deepspeed: `DeepSpeedEngine`, else `PlainEngine`.

    Collective over the world.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups, matrices = split_parameters(params, config.kind, config.weight_decay)
    device = params[0].device
    make = torch_optimizer(config, fused=device.type == "cuda")
    bf16 = any(p.dtype == torch.bfloat16 for p in params)
    if deepspeed:
        engine = DeepSpeedEngine(groups, make, mesh, bf16=bf16, bucket_elements=bucket_elements)
    else:
        engine = PlainEngine(groups, make, mesh)
    muons = []
    if matrices:
        ns_dtype = torch.bfloat16 if bf16 and device.type == "cuda" else None
        muons = [Muon(matrices, mesh.dp_cp, momentum=config.muon_momentum, ns_steps=config.muon_ns_steps, weight_decay=config.weight_decay, ns_dtype=ns_dtype)]
    return Optimizer(engine, muons, config.clip_norm)
