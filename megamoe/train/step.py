"""The mathematics of one optimizer step, and of one evaluation. No clock, no files, no decisions about when.

Letters: T tokens of a micro-batch, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.data.batch import IGNORE_LABEL, Batch
from megamoe.layers.balance import BalanceReport, update_router_biases
from megamoe.model.transformer import Transformer
from megamoe.optim.optimizer import Optimizer, Update
from megamoe.parallel.agree import sum_counts
from megamoe.parallel.mesh import Mesh


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


def train_step(model: Transformer, optimizer: Optimizer, batches: list[Batch], lr: float, mesh: Mesh, *, num_tokens: int, num_bytes: int) -> StepResult:
    """Forward and backward of every micro-batch, then one update of weights and router biases.

    Args:
        model: in training mode.
        batches: this rank's micro-batches, on the device.
        num_tokens, num_bytes: sums over all ranks and micro-batches of the step (see `step_counts`).

    Every micro-batch's loss is a sum over tokens divided by the same `num_tokens`, so neither their number nor the number
    of ranks changes a gradient. Collective over the world; syncs the host once, for the gradient norm.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].tokens_T.device)
    for batch in batches:
        with optimizer.micro_batch():
            total, next_token = micro_batch_loss(model, batch)
            (total / max(1, num_tokens)).backward()
        loss_sum += next_token.detach().double()
    update = optimizer.step(lr)
    return StepResult(loss_sum, num_tokens, num_bytes, update, update_router_biases(model, group=mesh.dp_cp.group))


def micro_batch_loss(model: Transformer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss to minimise, its next-token part): sums over the micro-batch's target tokens in nats, scalars on the device.

    The first adds the MTP layer's loss with its weight. Positions without a label are padding: they are routed to no
    expert and counted in no balancing statistic.
    """
    stream = {
        "cu_seqlens": batch.cu_seqlens, "positions_T": batch.positions_T,
        "token_mask_T": batch.labels_T != IGNORE_LABEL, "max_seqlen": batch.max_document_tokens,
    }
    hidden_TD = model(batch.tokens_T, **stream)
    next_token = model.token_losses(hidden_TD, batch.labels_T).sum()
    mtp = model.config.mtp
    if not mtp.num_layers or not model.training:
        return next_token, next_token
    return next_token + mtp.loss_weight * model.mtp_token_losses(hidden_TD, batch.tokens_T, batch.labels_T, **stream).sum(), next_token


def step_counts(batches: Iterable[Batch], stop: bool, mesh: Mesh) -> tuple[int, int, bool]:
    """Target tokens and bytes of the step over all ranks, and whether any rank asks to stop. Collective, on the CPU."""
    batches = list(batches)
    tokens, num_bytes, stops = sum_counts(mesh, [sum(b.num_target_tokens for b in batches), sum(b.num_bytes for b in batches), int(stop)])
    return tokens, num_bytes, stops > 0


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch], mesh: Mesh) -> tuple[float, float]:
    """Mean next-token loss in nats and bits per byte over held-out micro-batches of all ranks.

    The model is in evaluation mode for the call: router biases stay as they are. Collective; syncs the host.
    """
    training = model.training
    model.eval()
    loss_sum, tokens, num_bytes = None, 0, 0
    for batch in batches:
        loss = micro_batch_loss(model, batch)[1].double()
        loss_sum = loss if loss_sum is None else loss_sum + loss
        tokens, num_bytes = tokens + batch.num_target_tokens, num_bytes + batch.num_bytes
    model.train(training)
    tokens, num_bytes = sum_counts(mesh, [tokens, num_bytes])
    if loss_sum is None:
        loss_sum = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    total = global_sum(loss_sum, mesh)
    return total / max(1, tokens), total / max(1, num_bytes) / math.log(2)


def global_sum(value: torch.Tensor, mesh: Mesh) -> float:
    """Sum of a device scalar over the ranks that hold distinct tokens. Collective; syncs the host."""
    value = value.clone()
    if mesh.dp_cp.group is not None:
        dist.all_reduce(value, group=mesh.dp_cp.group)
    return value.item()
