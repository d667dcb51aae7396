"""Configuration of the optimizer and its schedule. No torch import here."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from megamoe.utils.errors import check


class OptimizerKind(enum.Enum):
    """`muon` gives matrices to per-head Muon and the rest to AdamW; `sgd` exists for proofs: AdamW hides errors of the norm."""

    muon = "muon"
    adamw = "adamw"
    sgd = "sgd"


class ScheduleKind(enum.Enum):
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


@dataclass
class QKClipConfig:
    """QK-clip of MLA heads, see `qk_clip.py`.

    Attributes:
        tau: largest attention logit a head may reach before its query and key projections are scaled down; 0 switches it off.
        every: steps between two looks at the logits. A look costs about 60 % of the attention core's forward arithmetic, unfused.
    """

    tau: float = 100.0
    every: int = 1

    def __post_init__(self) -> None:
        check(self.tau >= 0 and math.isfinite(self.tau), "optim.qk_clip.tau", self.tau, "must be a finite number, zero (off) or above; K2 used 100")
        check(self.every >= 1, "optim.qk_clip.every", self.every, "must be at least 1; optim.qk_clip.tau=0 switches the clip off")


@dataclass
class OptimConfig:
    """One learning rate for both groups: Muon's update is scaled to AdamW's RMS (0.2·sqrt(max(rows, cols))).

    Attributes:
        lr, min_lr_ratio: peak rate, and the floor as a fraction of it.
        schedule: `cosine`, `wsd` (warm-up, stable, linear decay over the last `decay_fraction` of the steps), `constant`.
        warmup_fraction: linear warm-up as a share of all steps (the K3 report: 1 %).
        clip_norm: one clip of the global gradient norm over both groups; 0 switches it off.
        muon_momentum, muon_ns_steps: momentum (Nesterov) and Newton–Schulz iterations.
        qk_clip: bound of the attention logits, with any `kind`.
    """

    kind: OptimizerKind = OptimizerKind.muon
    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    schedule: ScheduleKind = ScheduleKind.cosine
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.2
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    qk_clip: QKClipConfig = field(default_factory=QKClipConfig)

    def __post_init__(self) -> None:
        check(self.lr >= 0 and math.isfinite(self.lr), "optim.lr", self.lr, "must be a finite number, zero or above")
        check(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        check(0 <= self.warmup_fraction < 1, "optim.warmup_fraction", self.warmup_fraction, "must lie in [0, 1)")
        check(0 <= self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "must lie in [0, 1]")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must be zero or above")
        check(self.clip_norm >= 0, "optim.clip_norm", self.clip_norm, "must be zero (off) or above")
        check(0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1, "optim.adam_beta1/2", (self.adam_beta1, self.adam_beta2), "must lie in [0, 1)")
        check(self.adam_eps > 0, "optim.adam_eps", self.adam_eps, "must be positive")
        check(0 <= self.muon_momentum < 1, "optim.muon_momentum", self.muon_momentum, "must lie in [0, 1)")
        check(1 <= self.muon_ns_steps <= 20, "optim.muon_ns_steps", self.muon_ns_steps, "must lie in [1, 20]")
