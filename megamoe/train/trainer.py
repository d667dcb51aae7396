"""The loop: it owns the clock, decides when to log, evaluate, save and stop, and leaves the mathematics to `step.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from megamoe.checkpoint.store import CheckpointStore, SaveError
from megamoe.data.batch import IGNORE_LABEL, collate
from megamoe.data.dataset import WindowDataset
from megamoe.data.loader import BatchLoader
from megamoe.model.flops import count_parameters, flops_per_token
from megamoe.model.transformer import Transformer
from megamoe.monitor import Monitor
from megamoe.optim.optimizer import Optimizer
from megamoe.optim.schedule import learning_rate
from megamoe.parallel.agree import on_first_rank
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.plan import gather_whole, load_whole
from megamoe.parallel.watch import Watch
from megamoe.train.config import Config
from megamoe.train.step import StepResult, evaluate, step_counts, train_step
from megamoe.utils.device import peak_flops
from megamoe.utils.errors import UserError
from megamoe.utils.signals import StopRequest


@dataclass
class Progress:
    """Where a run stands: everything a resume needs beside tensors. `next_window` alone positions the data."""

    step: int = 0
    next_window: int = 0
    tokens: int = 0
    skipped_steps: int = 0


class Trainer:
    """One run on one rank. All methods are collective: every rank calls them in the same order.

    Args:
        monitor: rank 0's screens and files; None elsewhere.
        meta: facts stored with every checkpoint (fingerprints, resolved config).
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, pipeline: Pipeline, optimizer: Optimizer, train: WindowDataset, heldout: WindowDataset | None,
                 store: CheckpointStore, monitor: Monitor | None, stop: StopRequest, meta: dict):
        self.config, self.mesh, self.device = config, mesh, device
        self.pipeline, self.model, self.optimizer = pipeline, pipeline.stage, optimizer
        self.train_data, self.heldout = train, heldout
        self.store, self.monitor, self.stop, self.meta = store, monitor, stop, meta
        self.progress = Progress()
        self.watch = Watch(mesh, config.parallel.timeout_s)
        pipeline.on_phase = optimizer.on_phase = lambda phase: self.watch(f"step {self.progress.step + 1}: {phase}")
        self.saved_step: int | None = None
        self.last_evaluation: dict[str, float] = {}
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
        never_saved = on_first_rank(self.mesh, lambda: self.store.latest() is None)
        if self.saved_step != self.progress.step and self.progress.step > started_step or never_saved:
            self._save(last=True)
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
        interval = self.config.checkpoint.interval_steps
        if interval and step % interval == 0 and step < t.num_steps:
            self._save(last=False)

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
        self.last_evaluation = {"eval_loss": loss, "eval_bits_per_byte": bits}
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

    def _save(self, *, last: bool) -> None:
        model = gather_whole(self.model, self.mesh)
        state = {f"optimizer.{k}": v for k, v in self.optimizer.state_tensors().items()}
        state["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        try:
            path = self.store.save(self.progress.step, model, state, {"progress": vars(self.progress), **self.meta})
        except SaveError as error:
            if last:
                raise UserError(f"run.dir={self.config.run.dir}: the checkpoint of step {self.progress.step} could not be written ({error}); earlier ones are untouched") from None
            if self.monitor:
                self.monitor.event("save failed", f"step {self.progress.step}: {error}; tried again in {self.config.checkpoint.interval_steps} steps")
            return
        self.saved_step = self.progress.step
        if self.monitor:
            self.monitor.event("saved", str(path))

    def restore(self, model: dict[str, torch.Tensor], state: dict[str, torch.Tensor], meta: dict) -> None:
        """Continue exactly from what `CheckpointStore.load` read on the same layout. Collective."""
        load_whole(self.model, model)
        self.optimizer.load_state_tensors({k.removeprefix("optimizer."): v for k, v in state.items() if k.startswith("optimizer.")})
        torch.set_rng_state(state["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in state:
            torch.cuda.set_rng_state(state["rng.cuda"], self.device)
        self.progress = Progress(**meta["progress"])
        self.saved_step = self.progress.step


def _layer_number(router_name: str) -> str:
    """`layers.3.block_sparse_moe.gate` is 3; the MTP layer's router is `mtp`."""
    return next((part for part in router_name.split(".") if part.isdigit()), "mtp")
