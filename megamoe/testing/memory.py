"""Activation memory of one micro-batch: measured at the allocator, not computed from shapes."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megamoe.data.batch import Window, collate
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.stages import plan_stages
from megamoe.train.config import Config
from megamoe.train.run import build_model


@dataclass(frozen=True)
class ActivationMemory:
    """
    Attributes:
        peak_bytes: most that was allocated at a time between the start of a forward and the end of its backward, beyond what
            was there before: weights and their gradients. Transient buffers and what recomputation makes count. On a GPU from
            `max_memory_allocated`, on a CPU from the allocator's own events (`torch.profiler`).
        saved_bytes: most that autograd kept for backward at a time: storages given to saved-tensor hooks, each once, parameters
            and buffers left out. Inside a recomputed layer hooks see its inputs only.
    """

    peak_bytes: int
    saved_bytes: int


def activation_memory(config: Config, device: torch.device) -> ActivationMemory:
    """Forward and backward of one micro-batch of random tokens of a configuration, on one rank and without an optimizer.

    Runs three times: for gradients to exist and late choices to be made, for `saved_bytes`, for `peak_bytes`. Windows are whole
    documents of `train.seq_len`. No process group.
    """
    mesh = Mesh()
    stage = build_model(config, mesh, device).train()
    pipeline = Pipeline(stage, plan_stages(config.model, config.parallel, config.train.seq_len), mesh)
    batch = _random_batch(config)

    def run() -> None:
        pipeline.step([batch], num_tokens=batch.num_target_tokens)

    run()
    saved = SavedBytes([*stage.parameters(), *stage.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        run()
    assert saved.now == 0, "the graph is freed when the step is over"
    return ActivationMemory(_peak_on_gpu(run, device) if device.type == "cuda" else peak_on_cpu(run), saved.peak)


def _random_batch(config: Config):
    t, rng = config.train, np.random.default_rng(0)
    windows = [
        Window(rng.integers(0, config.model.vocab_size, t.seq_len), rng.integers(0, config.model.vocab_size, t.seq_len), np.array([0]), t.seq_len)
        for _ in range(t.micro_batch_tokens // t.seq_len)
    ]
    return collate(windows)


class SavedBytes:
    """Counts what autograd keeps, while it keeps it: use `pack` as the pack hook and `lambda kept: kept.tensor` as the other."""

    def __init__(self, leave_out: list[torch.Tensor]):
        self.leave_out = {t.untyped_storage().data_ptr() for t in leave_out}
        self.now = self.peak = 0
        self.users: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> _Kept:
        return _Kept(self, tensor)


class _Kept:
    def __init__(self, owner: SavedBytes, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        # Detached: an output that its own node keeps would hold the graph for ever. The address stays this one's while it lives.
        self.owner, self.tensor, self.address, self.bytes = owner, tensor.detach(), storage.data_ptr(), storage.nbytes()
        if self.address in owner.leave_out:
            self.bytes = 0
        owner.users[self.address] += 1
        if owner.users[self.address] == 1:
            owner.now += self.bytes
            owner.peak = max(owner.peak, owner.now)

    def __del__(self):
        self.owner.users[self.address] -= 1
        if not self.owner.users[self.address]:
            self.owner.now -= self.bytes


def _peak_on_gpu(run, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_on_cpu(run) -> int:
    """Most bytes of torch's CPU allocator in use at a time during `run()`, beyond those in use before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        events = json.loads(file.read_text())["traceEvents"]
    # Several threads write events (autograd has its own): their order is that of time, not of the file.
    moves = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0)
    return int(np.cumsum([0, *(n for _, n in moves)]).max())
