"""The mathematics of one optimizer step, and of one evaluation. No clock, no files, no decisions about when.

Letters: T tokens of a micro-batch, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.data.batch import Batch
from megamoe.layers.router import Router
from megamoe.layers.balance import BalanceReport, update_router_biases
from megamoe.optim.optimizer import Optimizer, Update
from megamoe.parallel.agree import sum_counts
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.pipeline import Pipeline


@dataclass
class StepResult:
    """What a step leaves behind. Device tensors are read back only when the step is logged.

    Attributes:
        loss_sum: sum of this rank's token losses in nats, next-token part only (device scalar).
        num_tokens, num_bytes: target tokens and their bytes over all ranks.
        update: gradient norm and whether the step was skipped.
        balance: routing of the global batch and the new biases, on the device; None without MoE layers.
    """

    loss_sum: torch.Tensor
    num_tokens: int
    num_bytes: int
    update: Update
    balance: BalanceReport | None

    def loss(self, mesh: Mesh) -> float:
        """Mean loss in nats per token over all ranks. Collective; syncs the host."""
        return global_sum(self.loss_sum, mesh) / max(1, self.num_tokens)

    def bits_per_byte(self, loss: float) -> float:
        return loss * self.num_tokens / max(1, self.num_bytes) / math.log(2)


def train_step(pipeline: Pipeline, optimizer: Optimizer, batches: list[Batch], lr: float, *, num_tokens: int, num_bytes: int) -> StepResult:
    """Forward and backward of every micro-batch, then one update of weights and router biases.

    Args:
        pipeline: of a model in training mode.
        batches: this data-parallel rank's micro-batches.
        num_tokens, num_bytes: sums over all data-parallel ranks and micro-batches of the step (see `step_counts`).

    Every micro-batch's loss is a sum over tokens divided by the same `num_tokens`, so neither their number nor the number
    of ranks changes a gradient. Collective over the world; syncs the host once, for the gradient norm.
    """
    loss_sum = pipeline.step(batches, num_tokens=num_tokens, micro_batch=optimizer.micro_batch)
    update = optimizer.step(lr)
    if update.skipped:
        # Scores of a forward that was not finite must not move the biases either.
        for module in pipeline.stage.modules():
            if isinstance(module, Router):
                module.reset_stats()
        return StepResult(loss_sum, num_tokens, num_bytes, update, None)
    return StepResult(loss_sum, num_tokens, num_bytes, update, balance_routers(pipeline))


def balance_routers(pipeline: Pipeline) -> BalanceReport | None:
    """Move this stage's router biases; report the layers of all stages, in the model's order. Collective over the world."""
    mesh, config = pipeline.mesh, pipeline.stage.config
    # Under sequence shards every rank of a stage has routed tokens of its own.
    report = update_router_biases(pipeline.stage, group=mesh.stage.group)
    if mesh.pp.group is None:
        return report
    layers = [f"layers.{n}.block_sparse_moe.gate" for n in range(config.num_layers) if config.is_moe(n)]
    if layers and config.mtp.num_layers:
        layers.append("mtp.block.block_sparse_moe.gate")
    if not layers:
        return None
    L, E = len(layers), config.moe.num_experts
    count_LE = torch.zeros(L, E, dtype=torch.int64, device=pipeline.device)
    rest_L1E = torch.zeros(L, E + 1, dtype=torch.float64, device=pipeline.device)
    if report is not None:
        rows = torch.tensor([layers.index(name) for name in report.layers], device=pipeline.device)
        count_LE[rows] = report.count_LE
        rest_L1E[rows] = torch.cat([report.max_vio_L[:, None], report.bias_LE.double()], 1)
    dist.all_reduce(count_LE, group=mesh.pp.group)
    dist.all_reduce(rest_L1E, group=mesh.pp.group)
    return BalanceReport(layers, count_LE, rest_L1E[:, 0], rest_L1E[:, 1:])


def step_counts(batches: Iterable[Batch], stop: bool, mesh: Mesh) -> tuple[int, int, bool]:
    """Target tokens and bytes of the step over all ranks, and whether any rank asks to stop. Collective, on the CPU."""
    tokens, num_bytes = own_counts(batches, mesh)
    tokens, num_bytes, stops = sum_counts(mesh, [tokens, num_bytes, int(stop)])
    return tokens, num_bytes, stops > 0


def own_counts(batches: Iterable[Batch], mesh: Mesh) -> tuple[int, int]:
    """(target tokens, bytes) that this rank adds to a sum over the world: of the ranks that read the same batches, one does."""
    if mesh.pp.rank or mesh.cp.rank or mesh.tp.rank:
        return 0, 0
    batches = list(batches)
    return sum(b.num_target_tokens for b in batches), sum(b.num_bytes for b in batches)


def evaluate(pipeline: Pipeline, batches: Iterable[Batch]) -> tuple[float, float]:
    """Mean next-token loss in nats and bits per byte over held-out micro-batches of all ranks.

    The model is in evaluation mode for the call: router biases stay as they are. Every rank passes as many micro-batches.
    Collective; syncs the host.
    """
    mesh, model = pipeline.mesh, pipeline.stage
    training, batches = model.training, list(batches)
    model.eval()
    loss_sum = pipeline.evaluate(batches)
    model.train(training)
    tokens, num_bytes = sum_counts(mesh, list(own_counts(batches, mesh)))
    total = global_sum(loss_sum, mesh)
    return total / max(1, tokens), total / max(1, num_bytes) / math.log(2)


def global_sum(value: torch.Tensor, mesh: Mesh) -> float:
    """Sum of `Pipeline.step`'s result over the world: zero without the head, the same on all tp ranks. Collective; syncs the host."""
    value = value.clone()
    if mesh.world.group is not None:
        dist.all_reduce(value, group=mesh.world.group)
    return value.item() / mesh.tp.size
