"""The proof that a checkpoint belongs to the model and not to the layout: saved on one, loaded on another, saved again.

On layout A a small model trains two steps, saves, and goes on for two more: the uninterrupted run. Layout B loads what A
saved, saves it again at once, and goes on from the stored data position. Then

    tensors    every tensor that B saved has the bytes of A's: weights, buffers, router biases, AdamW and Muon state
    state      progress and AdamW's step count are equal
    loss       of the two further steps, against the uninterrupted run

The two runs meet only in files. Batches are a function of their number (`proof.make_batch`), so that a data rank that goes on
at the wrong one shows in the loss.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megamoe.checkpoint.config import CheckpointConfig
from megamoe.checkpoint.format import xxh3
from megamoe.checkpoint.live import fill, read_pieces, state_pieces, weight_pieces
from megamoe.checkpoint.objects import Objects
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.checkpoint.saver import Saver
from megamoe.model.config import FFNConfig, ModelConfig, MTPConfig
from megamoe.model.init import init_parameters
from megamoe.optim.config import OptimConfig, OptimizerKind
from megamoe.optim.optimizer import build_optimizer
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import build_mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.plan import build_stage
from megamoe.parallel.stages import plan_stages
from megamoe.testing.pool import RankPool
from megamoe.testing.proof import Case, make_batch, small_model, stir
from megamoe.train.step import balance_routers, global_sum

STEPS = 2
MICRO_BATCHES = 8
LEARNING_RATE = 2e-3
# name: (dtype, DeepSpeed, limit of the relative difference of losses on another layout)
ENGINES = {
    "plain fp64": (torch.float64, False, 1e-10),
    "plain fp32": (torch.float32, False, 1e-6),
    "deepspeed fp32": (torch.float32, True, 1e-6),
    "deepspeed bf16": (torch.bfloat16, True, 1e-2),
}


@dataclass(frozen=True)
class Layout:
    world: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: str = "deepspeed fp32"

    def __str__(self) -> str:
        return Case(small_model(), self.parallel, self.world).name


@dataclass(frozen=True)
class Move:
    """From layout `a` to layout `b`. `note` says what is special."""

    a: Layout
    b: Layout
    note: str = ""
    model: ModelConfig = field(default_factory=small_model)
    optimizer: OptimizerKind = OptimizerKind.muon

    @property
    def name(self) -> str:
        return f"{self.a} → {self.b}" + (f", {self.note}" if self.note else "")

    @property
    def exact(self) -> bool:
        return self.a == self.b


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    different: tensors whose bytes differ, or that only one side has.
    loss: largest relative difference of the losses after the move.
    """

    move: Move
    num_tensors: int
    num_bytes: int
    different: list[str]
    state_equal: bool
    loss: float

    @property
    def limit(self) -> float:
        return 0.0 if self.move.exact else ENGINES[self.move.b.engine][2]

    @property
    def passed(self) -> bool:
        return not self.different and self.state_equal and self.num_tensors > 0 and self.loss <= self.limit


def moves() -> list[Move]:
    """The list of layouts to move between. The first ones need four ranks at most."""

    def layout(world: int, engine: str = "deepspeed fp32", **axes: int) -> Layout:
        return Layout(world, ParallelConfig(**axes), engine)

    tied, mtp = small_model(tie_embeddings=True), small_model(mtp=MTPConfig(num_layers=1))
    dense = small_model(ffn=FFNConfig(dense_size=32))
    return [
        Move(layout(2, tp=2), layout(2, pp=2)),
        Move(layout(4, ep=4), layout(2, ep=2)),
        Move(layout(4, cp=2, tp=2), layout(1)),
        Move(layout(4), layout(2), "ZeRO-1 and Muon's owners"),
        Move(layout(2, pp=2, vpp=2), layout(2, pp=2)),
        Move(layout(2), layout(4), "Muon's owners"),
        Move(layout(4, pp=2, ep=2), layout(4, tp=2, ep=2)),
        Move(layout(2), layout(2, cp=2)),
        Move(layout(1), layout(4, ep=4)),
        Move(layout(2, pp=2), layout(2, tp=2), "tied embeddings", tied),
        Move(layout(2, tp=2), layout(4, pp=2, cp=2), "tied embeddings", tied),
        Move(layout(2, pp=2), layout(2, ep=2), "MTP", mtp),
        Move(layout(4, tp=2), layout(2, pp=2), "AdamW alone", optimizer=OptimizerKind.adamw),
        Move(layout(4, tp=2, pp=2), layout(2, cp=2), "wider FFN", dense),
        Move(layout(2, "deepspeed bf16", tp=2), layout(4, "deepspeed bf16", ep=2), "bf16"),
        Move(layout(4, "deepspeed bf16", pp=2, ep=2), layout(1, "deepspeed bf16"), "bf16"),
        Move(layout(4, "plain fp64", tp=2, ep=4), layout(2, "plain fp64", pp=2), "fp64"),
        Move(layout(2, "plain fp32"), layout(2, tp=2), "plain → DeepSpeed"),
        Move(layout(4, pp=2, tp=2), layout(4, pp=2, tp=2), "same layout"),
        Move(layout(2, "deepspeed bf16"), layout(2, "deepspeed bf16"), "same layout, bf16"),
        Move(layout(8, pp=2, tp=2, ep=4), layout(8, pp=4, cp=2)),
    ]  # fmt: skip


def prove(pool: RankPool, move: Move, folder: Path, *, timeout_s: float = 240) -> Verdict:
    """Run both halves of a move on the pool's ranks; files go to `folder`, which must be new."""
    a, b = f"{folder}/a", f"{folder}/b"
    straight = pool.run(run_half, move.a.world, move, move.a, a, "", timeout_s=timeout_s)[0]
    moved = pool.run(run_half, move.b.world, move, move.b, b, f"{a}/step_{STEPS:08d}", timeout_s=timeout_s)[0]
    saved, again = (open_checkpoint(f"{place}/step_{STEPS:08d}") for place in (a, b))
    difference = max(abs(x - y) / abs(x) for x, y in zip(straight, moved, strict=True))
    num_bytes = sum(saved.entry(name).num_bytes for name in saved.names())
    state_equal = all(saved.state[key] == again.state[key] for key in ("progress", "adam_step"))
    return Verdict(move, len(saved.names()), num_bytes, differences(saved, again), state_equal, difference)


def differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Names of tensors that are not the same bytes in both."""
    shared = set(a.names()) & set(b.names())
    unequal = [name for name in shared if (a.entry(name).dtype, a.entry(name).shape, _hash(a, name)) != (b.entry(name).dtype, b.entry(name).shape, _hash(b, name))]
    return sorted(set(a.names()) ^ set(b.names())) + sorted(unequal)


def _hash(checkpoint: Checkpoint, name: str) -> str:
    return xxh3(checkpoint.read(name).reshape(-1).view(torch.uint8).numpy().tobytes())


def run_half(move: Move, layout: Layout, place: str, resume: str) -> list[float]:
    """Losses of steps 3 and 4 on this rank: after an uninterrupted start, or from the checkpoint `resume`. Saves step 2 in
    `place`. RANK, WORLD_SIZE and MASTER_* are in the environment. Collective."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    dtype, deepspeed, _ = ENGINES[layout.engine]
    cpu = torch.device("cpu")
    with process_group(cpu, 60, deepspeed=deepspeed):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        mesh = build_mesh(layout.parallel)
        stage = build_stage(move.model, layout.parallel, mesh, device="cpu")
        stage.to(dtype)
        init_parameters(stage, move.model, seed=7)
        if not resume:
            stir(stage)
        stage.train()
        pipeline = Pipeline(stage, plan_stages(move.model, layout.parallel), mesh)
        config = OptimConfig(kind=move.optimizer, lr=LEARNING_RATE, clip_norm=0.5, weight_decay=0.1)
        optimizer = build_optimizer(stage, config, mesh, deepspeed=deepspeed, bucket_elements=5000)
        saver = Saver(Objects(place, create=True), CheckpointConfig(), mesh, cpu, "proof")
        progress = {"step": 0, "next_window": 0}

        def pieces():
            return weight_pieces(stage, mesh) + state_pieces(optimizer.state_fragments(), mesh)

        def train() -> list[float]:
            losses = []
            for _ in range(STEPS):
                numbers = range(progress["next_window"], progress["next_window"] + MICRO_BATCHES)
                batches = [make_batch(i, move.model.vocab_size, packing=True) for i in numbers]
                num_tokens = sum(b.num_target_tokens for b in batches)
                optimizer.begin_step(progress["step"])
                loss_sum = pipeline.step(batches[mesh.dp.rank :: mesh.dp.size], num_tokens=num_tokens, micro_batch=optimizer.micro_batch)
                losses.append(global_sum(loss_sum, mesh) / num_tokens)
                optimizer.step(LEARNING_RATE)
                balance_routers(pipeline)
                progress.update(step=progress["step"] + 1, next_window=numbers.stop)
            return losses

        if resume:
            checkpoint = open_checkpoint(resume)
            optimizer.create_state(checkpoint.state["adam_step"])
            held = pieces()
            fill(held, read_pieces(checkpoint, held))
            progress.update(checkpoint.state["progress"])
        else:
            train()
        saver.begin(progress["step"], pieces(), {"progress": dict(progress), "adam_step": optimizer.adam_step()})
        # Weights move on while the copy is written.
        losses = train()
        result = saver.wait()
        assert result is not None and not result.error, result
        return losses
