"""The whole configuration of a run: one dataclass per concern, nested, and the checks that span sections.

Hydra fills this in `launch/schema.py`; everything below `launch/` receives a `Config`. No torch import here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from megamoe.checkpoint.config import CheckpointConfig
from megamoe.data.config import DataConfig
from megamoe.model.config import ModelConfig
from megamoe.monitor.config import MonitorConfig
from megamoe.optim.config import OptimConfig
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.stages import check_layout, check_tokens
from megamoe.utils.errors import check


class Precision(enum.Enum):
    """Compute dtype of the model. fp64 serves proofs and needs `engine.kind=plain`."""

    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"


class Recompute(enum.Enum):
    """What each block recomputes in backward instead of keeping. The AttnRes mix is always recomputed."""

    none = "none"
    attention = "attention"
    experts = "experts"
    full = "full"


class EngineKind(enum.Enum):
    deepspeed = "deepspeed"
    plain = "plain"


class Device(enum.Enum):
    """`auto` takes the GPU when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class EngineConfig:
    """
    Attributes:
        kind: `deepspeed` (ZeRO-1, fp32 masters) or `plain` (own sum reduction, torch optimizer, any dtype: the oracle).
        reduce_bucket_elements: size of the gradient buckets.
    """

    kind: EngineKind = EngineKind.deepspeed
    reduce_bucket_elements: int = 50_000_000

    def __post_init__(self) -> None:
        check(self.reduce_bucket_elements > 0, "engine.reduce_bucket_elements", self.reduce_bucket_elements, "must be positive")


@dataclass
class TrainConfig:
    """
    Attributes:
        seq_len: window length in tokens.
        global_batch_tokens: tokens of one optimizer step over all ranks; a multiple of seq_len.
        micro_batch_tokens: tokens of one packed stream a rank processes at once; a multiple of seq_len.
        num_steps: optimizer steps of the run.
        seed: seeds initialisation and data order.
        precision, device, recompute: see the enums.
        offload: keep what layers save for backward in host memory (pinned, on a GPU) until shortly before it is needed.
        offload_min_bytes: tensors below this size stay on the device.
        eval_interval_steps, eval_windows: held-out evaluation every so many steps (0: only at the end) over so many windows.
        max_minutes: stop cleanly (saved) after so many minutes; 0 has no limit.
    """

    seq_len: int = 1024
    global_batch_tokens: int = 8192
    micro_batch_tokens: int = 4096
    num_steps: int = 300
    seed: int = 1234
    precision: Precision = Precision.fp32
    device: Device = Device.auto
    recompute: Recompute = Recompute.none
    offload: bool = False
    offload_min_bytes: int = 1_048_576
    eval_interval_steps: int = 50
    eval_windows: int = 32
    max_minutes: float = 0.0

    def __post_init__(self) -> None:
        check(self.seq_len >= 1, "train.seq_len", self.seq_len, "must be at least 1")
        for key in ("global_batch_tokens", "micro_batch_tokens"):
            value = getattr(self, key)
            check(value >= self.seq_len and value % self.seq_len == 0, f"train.{key}", value,
                  f"must be a multiple of train.seq_len={self.seq_len}; {max(1, value // self.seq_len) * self.seq_len} would work")
        check(self.offload_min_bytes >= 0, "train.offload_min_bytes", self.offload_min_bytes, "must be zero or above")
        check(self.num_steps >= 0, "train.num_steps", self.num_steps, "must be zero or above")
        check(self.eval_interval_steps >= 0, "train.eval_interval_steps", self.eval_interval_steps, "must be zero (only at the end) or above")
        check(self.eval_windows >= 1, "train.eval_windows", self.eval_windows, "must be at least 1")
        check(self.max_minutes >= 0, "train.max_minutes", self.max_minutes, "must be zero (no limit) or above")


@dataclass
class RunConfig:
    """
    Attributes:
        dir: the run folder: resolved config, checkpoints, metrics.jsonl, plots. One writer at a time.
        init_from: a new run starts from the weights of this checkpoint (a run folder, its checkpoints, one of them, or s3://…), with
            fresh optimizer, schedule and data order. A run that has checkpoints of its own continues those instead.
        resume: `auto` continues the newest complete checkpoint of `dir`, `never` refuses a folder that has one, or a path.
        allow_change: names of things a resume may differ in: `tokenizer` (its vocabulary with it), `blend`, `order`.
    """

    dir: str = "runs/default"
    init_from: str = ""
    resume: str = "auto"
    allow_change: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(bool(self.dir), "run.dir", repr(self.dir), "must name a folder")
        unknown = sorted(set(self.allow_change) - {"tokenizer", "blend", "order"})
        check(not unknown, "run.allow_change", unknown, "may name only: tokenizer, blend, order")


@dataclass
class Config:
    """A run. Sections check themselves when built; `validate` checks what spans them."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def validate(self, world_size: int | None = None) -> None:
        """Check what spans sections; with `world_size`, the layout too.

        Raises:
            UserError: one line with the key, the value and the way out.
        """
        check(self.engine.kind is EngineKind.plain or self.train.precision is not Precision.fp64, "train.precision", "fp64",
              "the deepspeed engine keeps fp32 masters; set engine.kind=plain")
        if world_size is None:
            return
        check_layout(self.model, self.parallel)
        dp = self.parallel.resolve_dp(world_size)
        ranks_tokens = dp * self.train.micro_batch_tokens
        check(self.train.global_batch_tokens % ranks_tokens == 0, "train.global_batch_tokens", self.train.global_batch_tokens,
              f"must be a multiple of dp·micro_batch_tokens = {dp}·{self.train.micro_batch_tokens}; "
              f"{max(1, self.train.global_batch_tokens // ranks_tokens) * ranks_tokens} would work")
        check_tokens(self.parallel, self.train.micro_batch_tokens, self.micro_batches_per_step(dp))

    def micro_batches_per_step(self, dp: int) -> int:
        """Accumulation steps of each data-parallel rank."""
        return self.train.global_batch_tokens // (dp * self.train.micro_batch_tokens)
