"""The loop: it owns the clock, decides when to log, evaluate, save and stop, and leaves the mathematics to `step.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from megamoe.checkpoint.format import RNG, step_folder
from megamoe.checkpoint.live import Piece, fill, read_pieces, state_pieces, weight_pieces
from megamoe.checkpoint.reader import Checkpoint, committed
from megamoe.checkpoint.saver import Saver, SaveResult
from megamoe.data.batch import IGNORE_LABEL, collate
from megamoe.data.dataset import WindowDataset
from megamoe.data.loader import BatchLoader
from megamoe.model.flops import count_parameters, flops_per_token
from megamoe.model.transformer import Transformer
from megamoe.monitor import Monitor
from megamoe.optim.optimizer import Optimizer
from megamoe.optim.schedule import learning_rate
from megamoe.parallel.agree import on_every_rank, on_first_rank
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.watch import Watch
from megamoe.train.config import Config
from megamoe.train.step import StepResult, evaluate, step_counts, train_step
from megamoe.utils.device import peak_flops
from megamoe.utils.errors import UserError, check
from megamoe.utils.signals import StopRequest


@dataclass
class Progress:
    """Where a run stands: everything a resume needs beside tensors. `next_window` alone positions the data."""

    step: int = 0
    next_window: int = 0
    tokens: int = 0
    skipped_steps: int = 0

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Progress:
        """Where the run that wrote a checkpoint stood.

        Raises:
            UserError: the checkpoint is not one of a run.
        """
        stored = checkpoint.state.get("progress")
        names = {f.name for f in fields(cls)}
        usable = isinstance(stored, dict) and stored.keys() == names and all(type(v) is int and v >= 0 for v in stored.values()) and stored["step"] == checkpoint.step
        check(usable, "run.resume", checkpoint.location, "does not say where its run stood; it holds weights only, or is damaged")
        return cls(**stored)


class Trainer:
    """One run on one rank. All methods are collective: every rank calls them in the same order.

    Args:
        saver: writes checkpoints beside training.
        monitor: rank 0's screens and files; None elsewhere.
        meta: facts stored with every checkpoint (fingerprints, resolved config, code revision).
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, pipeline: Pipeline, optimizer: Optimizer, train: WindowDataset, heldout: WindowDataset | None,
                 saver: Saver, monitor: Monitor | None, stop: StopRequest, meta: dict):
        self.config, self.mesh, self.device = config, mesh, device
        self.pipeline, self.model, self.optimizer = pipeline, pipeline.stage, optimizer
        self.train_data, self.heldout = train, heldout
        self.saver, self.monitor, self.stop, self.meta = saver, monitor, stop, meta
        self.progress = Progress()
        self.watch = Watch(mesh, config.parallel.timeout_s)
        pipeline.on_phase = optimizer.on_phase = lambda phase: self.watch(f"step {self.progress.step + 1}: {phase}")
        self.saved_step: int | None = None
        self._next_save, self._failed_saves = 0, 0
        self.last_evaluation: dict[str, float] = {}
        self._evaluated_step = -1
        with torch.device("meta"):
            whole = Transformer(config.model)
        self.flops_per_token = flops_per_token(config.model, count_parameters(whole, config.model), (config.train.seq_len + 1) / 2).total
        self.peak_flops = peak_flops(device)

    def fit(self) -> dict:
        """Train to `num_steps`, or until a stop is asked for. Returns the summary of the run.

        Raises:
            UserError: the last save of the run failed (earlier ones are retried at the next interval).
        """
        t = self.config.train
        windows = t.micro_batch_tokens // t.seq_len
        loader = BatchLoader(self.train_data, global_batch_windows=t.global_batch_tokens // t.seq_len, micro_batch_windows=windows,
                             dp_rank=self.mesh.dp.rank, dp_size=self.mesh.dp.size, start_index=self.progress.next_window)
        started, started_step = time.monotonic(), self.progress.step
        self._next_save = self._after(self.progress.step)
        self.model.train()
        stopped = False
        try:
            batches = iter(loader)
            while self.progress.step < t.num_steps:
                if t.max_minutes and time.monotonic() - started > 60 * t.max_minutes:
                    self.stop.ask(f"train.max_minutes={t.max_minutes}")
                begin = time.perf_counter()
                self.watch(f"step {self.progress.step + 1}: data and token counts")
                micro = next(batches)
                num_tokens, num_bytes, stopped = step_counts(micro, bool(self.stop), self.mesh)
                if stopped:
                    break
                lr = learning_rate(self.config.optim, self.progress.step, t.num_steps)
                self.optimizer.begin_step(self.progress.step)
                result = train_step(self.pipeline, self.optimizer, micro, lr, num_tokens=num_tokens, num_bytes=num_bytes)
                self.progress.step += 1
                self.progress.next_window += t.global_batch_tokens // t.seq_len
                self.progress.tokens += num_tokens
                self.progress.skipped_steps += result.update.skipped
                self._after_step(result, lr, begin)
        finally:
            loader.close()
        summary = {"steps": self.progress.step, "stopped": self.stop.reason or "another rank was asked to" if stopped else "", "seconds": round(time.monotonic() - started, 1)}
        if not stopped:
            # A polite stop has seconds, not minutes: it saves at once and leaves evaluation to the next start.
            summary |= self.last_evaluation or self._evaluate()
        self.watch("the save under way")
        self._note(self.saver.wait())
        never_saved = on_first_rank(self.mesh, lambda: not committed(self.saver.place))
        if self.saved_step != self.progress.step and self.progress.step > started_step or never_saved:
            self.watch("the last save")
            self._begin_save()
            if (failed := self._note(self.saver.wait())):
                raise UserError(f"run.dir={self.config.run.dir}: the checkpoint of step {self.progress.step} could not be written ({failed}); earlier ones are untouched")
        if self.saver.blocked_s:
            summary["saves_blocked_share"] = round(self.saver.blocked_s / (time.monotonic() - started), 4)
        return summary

    def _after_step(self, result: StepResult, lr: float, begin: float) -> None:
        t, step = self.config.train, self.progress.step
        row: dict[str, float] = {}
        if step % self.config.monitor.log_interval_steps == 0 or step == t.num_steps:
            row = self._metrics(result, lr, begin)
        if step == t.num_steps or t.eval_interval_steps and step % t.eval_interval_steps == 0:
            row |= self._evaluate()
        if self.monitor and row:
            self.monitor.log(step, row)
        if self.monitor and result.balance and (step % self.config.monitor.load_interval_steps == 0 or step == t.num_steps):
            self.monitor.log_load(step, result.balance.count_LE.cpu().numpy())
        if self.monitor and result.update.skipped:
            self.monitor.event("skipped", f"step {step}: gradient norm {result.update.grad_norm}, weights left as they were")
        if self.saver.pending:
            self.watch(f"step {step}: the save under way")
            self._note(self.saver.poll())
        if step >= self._next_save and step < t.num_steps and not self.saver.pending:
            self._begin_save()

    def _metrics(self, result: StepResult, lr: float, begin: float) -> dict[str, float]:
        loss = result.loss(self.mesh)
        elapsed = time.perf_counter() - begin
        row = {
            "loss": loss, "bits_per_byte": result.bits_per_byte(loss), "lr": lr, "grad_norm": result.update.grad_norm,
            "tokens": self.progress.tokens, "step_time_s": elapsed, "tokens_per_s": result.num_tokens / elapsed,
        }
        if self.peak_flops:
            row["mfu"] = self.flops_per_token * result.num_tokens / elapsed / (self.peak_flops * self.mesh.world.size)
        if self.optimizer.qk_clip:
            row |= self.optimizer.qk_clip.metrics()
        if result.balance:
            violation = result.balance.max_vio_L.tolist()
            row |= {"maxvio_mean": sum(violation) / len(violation), "maxvio_max": max(violation), "router_bias_max": result.balance.bias_LE.abs().max().item()}
            row |= {f"maxvio/{_layer_number(name)}": v for name, v in zip(result.balance.layers, violation, strict=True)}
        if self.device.type == "cuda":
            row["mem_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return row

    def _evaluate(self) -> dict[str, float]:
        if not self.heldout:
            return {}
        loss, bits = evaluate(self.pipeline, self._heldout_batches())
        self.last_evaluation, self._evaluated_step = {"eval_loss": loss, "eval_bits_per_byte": bits}, self.progress.step
        return self.last_evaluation

    def _heldout_batches(self):
        t = self.config.train
        per_batch = t.micro_batch_tokens // t.seq_len
        available = len(self.heldout) if self.heldout else 0
        count = min(t.eval_windows, available)
        # Experts of one rank work for others: all ranks run as many micro-batches of one size, the last filled with
        # windows that have no targets.
        blank = replace(self.heldout.window(0), labels=np.full(t.seq_len, IGNORE_LABEL), num_bytes=0)
        rounds = -(-count // (self.mesh.dp.size * per_batch))
        mine = [j if j < count else None for j in range(self.mesh.dp.rank, rounds * per_batch * self.mesh.dp.size, self.mesh.dp.size)]
        for i in range(0, len(mine), per_batch):
            yield collate([blank if j is None else self.heldout.window(j) for j in mine[i : i + per_batch]])

    def pieces(self) -> list[Piece]:
        """Every box of every tensor of a checkpoint that this rank holds, live."""
        return weight_pieces(self.model, self.mesh) + state_pieces(self.optimizer.state_fragments(), self.mesh)

    def _begin_save(self) -> None:
        step = self.progress.step
        first = self.mesh.world.rank == 0
        random = [Piece(RNG + name, tuple(state.shape), ((0,), tuple(state.shape)), state, writes=first) for name, state in self._random_states().items()]
        state = {"progress": vars(self.progress).copy(), "adam_step": self.optimizer.adam_step(), "layout": str(self.mesh), **self.meta}
        metrics = self.last_evaluation if self._evaluated_step == step else {}
        self.saver.begin(step, self.pieces() + random, state, metrics)
        self._next_save = self._after(step)

    def _after(self, step: int) -> float:
        """The next step at which a save is due."""
        interval = self.config.checkpoint.interval_steps
        return (step // interval + 1) * interval if interval else float("inf")

    def _note(self, result: SaveResult | None) -> str:
        """Take in how a save ended; returns its error. One that failed is tried again: at the next step, then after 2, 4, 8, …"""
        if result is None:
            return ""
        if result.error:
            wait = min(2**self._failed_saves, self.config.checkpoint.interval_steps or 1)
            self._failed_saves += 1
            self._next_save = min(self._next_save, self.progress.step + wait)
            if self.monitor:
                self.monitor.event("save failed", f"step {result.step}: {result.error}; earlier checkpoints are untouched, it is tried again")
            return result.error
        self._failed_saves, self.saved_step = 0, result.step
        if self.monitor:
            self.monitor.event("saved", f"{self.saver.place.location}/{step_folder(result.step)}, {result.num_bytes / 2**20:,.1f} MiB in {result.took_s:.2f} s, training waited {result.blocked_s:.3f} s")
        return ""

    def _random_states(self) -> dict[str, torch.Tensor]:
        # Training draws from none of them, so all ranks' are alike; kept for what users add.
        states = {"torch.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["torch.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly from a checkpoint of any layout: each rank reads what it holds. Collective.

        Raises:
            UserError: on every rank, before any weight or state is changed: another model or optimizer, a damaged file.
        """
        progress = Progress.of(checkpoint)
        adam_step = checkpoint.state.get("adam_step")
        check(adam_step is None or type(adam_step) is int and adam_step >= 0, "run.resume", checkpoint.location, "has no usable adam_step; the checkpoint is damaged, resume from another")
        self.optimizer.create_state(adam_step)
        pieces = self.pieces()
        names = [name for name in (RNG + "torch.cpu", RNG + "torch.cuda") if name in checkpoint]
        # Reading may fail on one rank, and is agreed on before anything is filled.
        values, random = on_every_rank(self.mesh, lambda: (read_pieces(checkpoint, pieces), {name: checkpoint.read(name) for name in names}))
        fill(pieces, values)
        torch.set_rng_state(random.get(RNG + "torch.cpu", torch.get_rng_state()))
        if self.device.type == "cuda" and RNG + "torch.cuda" in random:
            torch.cuda.set_rng_state(random[RNG + "torch.cuda"], self.device)
        self.progress, self.saved_step = progress, progress.step


def _layer_number(router_name: str) -> str:
    """`layers.3.block_sparse_moe.gate` is 3; the MTP layer's router is `mtp`."""
    return next((part for part in router_name.split(".") if part.isdigit()), "mtp")
