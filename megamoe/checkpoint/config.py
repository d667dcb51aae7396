"""Configuration of checkpoints. No torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.utils.errors import check


@dataclass
class CheckpointConfig:
    """
    Attributes:
        interval_steps: save every so many steps, and always at the end; 0 saves only at the end and on a signal.
        keep_last: number of newest checkpoints kept; older ones are deleted after a newer one is complete.
    """

    interval_steps: int = 200
    keep_last: int = 2

    def __post_init__(self) -> None:
        check(self.interval_steps >= 0, "checkpoint.interval_steps", self.interval_steps, "must be zero (only at the end) or above")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "must be at least 1")
