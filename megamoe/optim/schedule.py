"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from megamoe.optim.config import OptimConfig, ScheduleKind


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of the update that follows `step` finished ones, of `num_steps` in all.

    Linear warm-up over `warmup_fraction`; then cosine to `min_lr_ratio`·lr, or (wsd) constant and a linear decay over
    the last `decay_fraction`, or constant.
    """
    warmup = max(1, round(config.warmup_fraction * num_steps)) if config.warmup_fraction > 0 else 0
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.min_lr_ratio
    if config.schedule is ScheduleKind.constant:
        factor = 1.0
    elif config.schedule is ScheduleKind.cosine:
        progress = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
        factor = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay = max(1, round(config.decay_fraction * num_steps))
        progress = min(1.0, max(0.0, (step - (num_steps - 1 - decay)) / decay))
        factor = 1 - (1 - floor) * progress
    return config.lr * factor
