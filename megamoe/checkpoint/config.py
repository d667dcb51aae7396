"""Configuration of checkpoints. No torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.utils.errors import check


@dataclass
class CheckpointConfig:
    """
    Attributes:
        dir: where checkpoints lie: a folder, or s3://bucket/prefix (credentials and endpoint from AWS_*); empty is `checkpoints` in run.dir.
        interval_steps: save every so many steps, and always at the end; 0 saves only at the end and on a signal.
        keep_last: number of newest checkpoints kept; older ones are deleted after a newer one is complete.
        keep_every_steps: checkpoints of every so many steps are kept for good; 0 keeps none for that.
        keep_best: number of checkpoints kept for their held-out loss, of those saved at a step that was evaluated; 0 keeps none for that.
    """

    dir: str = ""
    interval_steps: int = 200
    keep_last: int = 2
    keep_every_steps: int = 0
    keep_best: int = 0

    def __post_init__(self) -> None:
        check(self.interval_steps >= 0, "checkpoint.interval_steps", self.interval_steps, "must be zero (only at the end) or above")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "must be at least 1")
        check(self.keep_every_steps >= 0, "checkpoint.keep_every_steps", self.keep_every_steps, "must be zero (none) or above")
        check(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "must be zero (none) or above")
        scheme, separator, rest = self.dir.partition("://")
        check(not separator or scheme in ("s3", "file"), "checkpoint.dir", self.dir, "is neither a local path nor s3://bucket/prefix")
        check(scheme != "s3" or not separator or bool(rest.strip("/")), "checkpoint.dir", self.dir, "names no bucket: write s3://bucket/prefix")
