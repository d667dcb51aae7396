"""Forward and backward of a step: micro-batches through chunks of the model, on one rank or on many.

Every rank walks its list of actions (`schedule.py`). A boundary message is one tensor (n+1, t, D): the AttnRes rows that the
receiving rank has not seen of this micro-batch, and the running sum. Shapes follow from the stage plan; nothing is
negotiated. A rank keeps the rows of a micro-batch as detached leaves; every chunk on the rank reads the same ones:

    forward   rows that arrive, and rows that the chunk writes, become leaves of the rank's bank
    backward  gradients meet in the leaves: from later chunks on this rank, from the rank to which a row was passed on, and
              from this chunk. A chunk's own rows go into its backward as roots; rows that arrived go back the way they
              came. By then they are complete, because every user of a row comes after it in the model.

So each row crosses each boundary once in each direction, each layer runs backward once, and a micro-batch's rows are
freed with its last backward.

Sends are asynchronous, on a two-rank group per direction; a receive waits. The model is called directly: DeepSpeed's
engine never sees forward or backward (design.md D2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megamoe.layers.moe import hold_rounded
from megamoe.layers.stream import Stream
from megamoe.model.mtp import mtp_labels, shift_within_documents
from megamoe.model.transformer import Transformer
from megamoe.ops.linear_cross_entropy import IGNORE_LABEL
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.offload import ActivationOffload
from megamoe.parallel.schedule import Action, one_f_one_b, source_of, target_of
from megamoe.parallel.stages import StagePlan
from megamoe.parallel.stream import ShardedStream, shard_range, shard_stream, slice_range


@dataclass
class ChunkRun:
    """What a chunk's backward needs of its forward."""

    prefix_in: torch.Tensor | None
    received: range
    created: list[tuple[torch.Tensor, torch.Tensor]]
    output: torch.Tensor


@dataclass
class Flight:
    """One micro-batch on this rank: its rows, and the chunks that wait for their backward."""

    stream: ShardedStream
    num_tokens: int
    bank: list[torch.Tensor] = field(default_factory=list)
    runs: dict[int, ChunkRun] = field(default_factory=dict)


class Pipeline:
    """The forward and backward of this rank's stage. All methods are collective over the mesh.

    Args:
        stage: this rank's part of the model (`plan.build_stage`).
        plan: how layers fall into chunks.
        offload: moves what layers save for backward to host memory; None keeps it on the device.

    Attributes:
        on_phase: told what comes next, in words, before every forward and backward (see `watch.py`).
        bytes_sent: bytes this rank has sent over each boundary, forward and backward counted alike, since construction.
    """

    def __init__(self, stage: Transformer, plan: StagePlan, mesh: Mesh, offload: ActivationOffload | None = None):
        self.stage, self.plan, self.mesh, self.offload = stage, plan, mesh, offload
        self.chunks = plan.chunks_of(mesh.pp.rank)
        self.bytes_sent = {"F": [0] * (plan.num_chunks - 1), "B": [0] * (plan.num_chunks - 1)}
        self.on_phase: Callable[[str], None] = lambda phase: None
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._flights: dict[int, Flight] = {}

    @property
    def device(self) -> torch.device:
        return next(self.stage.parameters()).device

    @property
    def last(self) -> int:
        return self.plan.num_chunks - 1

    def step(self, batches: Sequence, *, num_tokens: int, micro_batch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are left on the parameters, unreduced.

        Args:
            batches: this data-parallel rank's micro-batches (`data.batch.Batch`), the same on all its pp, cp and tp ranks.
            num_tokens: target tokens of the step over all data-parallel ranks: every loss is divided by it, once.
            micro_batch: context for exactly one backward.

        Returns: sum of the next-token losses in nats over this rank's cp slices, float64 scalar on the device; zero on
            stages without the head, the same on all tp ranks.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        orders = one_f_one_b(self.mesh.pp.size, len(batches), self.plan.num_chunks // self.mesh.pp.size)
        with hold_rounded(self.stage):
            for action in orders[self.mesh.pp.rank]:
                self.on_phase(f"{'forward' if action.kind == 'F' else 'backward'} of micro-batch {action.micro}, chunk {action.chunk}")
                if action.kind == "F":
                    loss_sum += self._forward(action, batches[action.micro], 1.0 / max(1, num_tokens))
                else:
                    self._backward(action, micro_batch)
        self._finish_sends()
        assert not self._flights, "a micro-batch was not run back through every chunk"
        return loss_sum

    @torch.no_grad()
    def evaluate(self, batches: Iterable) -> torch.Tensor:
        """Sum of the next-token losses, as `step` returns it, without gradients. Every rank passes as many micro-batches."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with hold_rounded(self.stage):
            for micro, batch in enumerate(batches):
                for chunk in self.chunks:
                    loss_sum += self._forward(Action("F", micro, chunk), batch, 1.0)
                del self._flights[micro]
        self._finish_sends()
        return loss_sum

    def _forward(self, action: Action, batch, scale: float) -> torch.Tensor:
        micro, chunk = action.micro, action.chunk
        flight = self._flights.get(micro)
        if flight is None:
            # Positions without a label are padding: routed to no expert, counted in no balancing statistic.
            mask = batch.labels_T != IGNORE_LABEL
            stream = shard_stream(batch.tokens_T.shape[0], batch.cu_seqlens, self.mesh, device=self.device, token_mask_T=mask)
            flight = self._flights[micro] = Flight(stream, batch.tokens_T.shape[0])
        received = self.plan.rows_received(chunk)
        if chunk == 0:
            prefix_in, prefix = None, self.stage.embed(self._slice(batch.tokens_T))
        else:
            *rows, prefix_in = self._incoming(action, flight, len(received) + 1)
            assert received.start == len(flight.bank), "rows arrive in the model's order, each once"
            flight.bank += rows
            prefix = prefix_in
        known = len(flight.bank)
        bank, prefix = self._layers(chunk, tuple(flight.bank), prefix, flight.stream)
        created = [(row, row.detach().requires_grad_(row.requires_grad)) for row in bank[known:]]
        flight.bank += [leaf for _, leaf in created]
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if chunk == self.last:
            output, loss = self._loss(bank, prefix, batch, flight.stream, scale)
        else:
            output = prefix
            outgoing = [flight.bank[i] for i in self.plan.rows_received(chunk + 1)]
            self._send(action, torch.stack([*outgoing, prefix]).detach())
        if torch.is_grad_enabled():
            flight.runs[chunk] = ChunkRun(prefix_in, received, created, output)
        return loss

    def _layers(self, chunk: int, bank, prefix, stream):
        saved = None
        for number in self.plan.layers[chunk]:
            layer = self.stage.layers[str(number)]
            if self.offload is None or not torch.is_grad_enabled():
                bank, prefix = layer(bank, prefix, stream)
                continue
            # A layer that closes a block makes a row of its input.
            rows = (*bank, prefix) if layer.opens_block else bank
            with self.offload.layer(layer, rows, saved) as saved:
                bank, prefix = layer(bank, prefix, stream)
        if saved is not None:
            saved.release()
        return bank, prefix

    def _loss(self, bank, prefix, batch, stream: ShardedStream, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(what backward starts from, sum of next-token losses)."""
        hidden_tD = self.stage.finish(bank, prefix)
        next_token = self.stage.token_losses(hidden_tD, self._slice(batch.labels_T)).sum()
        total, config = next_token, self.stage.config
        if config.mtp.num_layers and self.stage.training:
            # Shifted in the whole stream: the token after a slice's last one is on another rank.
            whole = Stream(batch.cu_seqlens, batch.positions_T)
            next_tD = self.stage.embed(self._slice(shift_within_documents(batch.tokens_T, whole, 0)))
            mtp_TD = self.stage.mtp(hidden_tD, next_tD, stream)
            mtp = self.stage.loss_op.on(mtp_TD)(mtp_TD, self.stage.head_weight, self._slice(mtp_labels(batch.labels_T, whole)))
            total = total + config.mtp.loss_weight * mtp.sum()
        return total * scale, next_token.detach().double()

    def _backward(self, action: Action, micro_batch) -> None:
        micro, chunk = action.micro, action.chunk
        flight = self._flights[micro]
        run = flight.runs.pop(chunk)
        roots, grads = [run.output], [None]
        if chunk < self.last:
            back = self.plan.rows_received(chunk + 1)
            *row_grads, grads[0] = self._incoming(action, flight, len(back) + 1)
            for i, grad in zip(back, row_grads):
                _accumulate(flight.bank[i], grad)
        for row, leaf in run.created:
            if leaf.grad is not None:
                roots.append(row)
                grads.append(leaf.grad)
                leaf.grad = None
        with micro_batch():
            torch.autograd.backward(roots, grads)
        if chunk > 0:
            leaves = [*(flight.bank[i] for i in run.received), run.prefix_in]
            self._send(action, torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]))
        if not flight.runs and chunk == self.chunks[0]:
            del self._flights[micro]

    def _slice(self, x_T: torch.Tensor) -> torch.Tensor:
        return x_T[slice(*slice_range(x_T.shape[0], self.mesh))].to(self.device)

    def _incoming(self, action: Action, flight: Flight, count: int) -> list[torch.Tensor]:
        """The tensors of the message that `action` waits for; in forward they are leaves."""
        start, stop = shard_range(flight.num_tokens, self.mesh)
        x = torch.empty(count, stop - start, self.stage.config.d_model, dtype=self.message_dtype, device=self.device)
        source = source_of(action, self.mesh.pp.size, self.plan.num_chunks)
        assert source is not None, f"{action} has nobody to wait for"
        dist.irecv(x, self.mesh.pp.ranks[source], group=self.mesh.channels[(source, self.mesh.pp.rank, action.kind)]).wait()
        return [part.requires_grad_(action.kind == "F" and torch.is_grad_enabled()) for part in x.unbind(0)]

    @property
    def message_dtype(self) -> torch.dtype:
        """dtype of the residual stream: that of a layer norm, which is never kept wide."""
        return self.stage.layers[str(self.plan.layers[self.chunks[0]][0])].input_layernorm.weight.dtype

    def _send(self, action: Action, x: torch.Tensor) -> None:
        target = target_of(action, self.mesh.pp.size, self.plan.num_chunks)
        boundary = action.chunk if action.kind == "F" else action.chunk - 1
        self.bytes_sent[action.kind][boundary] += x.numel() * x.element_size()
        group = self.mesh.channels[(self.mesh.pp.rank, target, action.kind)]
        self._sends = [(work, kept) for work, kept in self._sends if not work.is_completed()]
        self._sends.append((dist.isend(x.contiguous(), self.mesh.pp.ranks[target], group=group), x))

    def _finish_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends = []


def _accumulate(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad
