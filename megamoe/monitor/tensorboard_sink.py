"""TensorBoard event files below the run folder, when asked for and when the package is there."""

from __future__ import annotations

from pathlib import Path


class TensorboardSink:
    """Scalars only.

    Raises:
        ImportError: the tensorboard package is not installed.
    """

    def __init__(self, run_dir: str | Path):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(Path(run_dir) / "tensorboard"))

    def log(self, step: int, row: dict) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def log_load(self, step: int, load_LE) -> None:
        """The load matrix stays in the run folder."""

    def event(self, kind: str, message: str) -> None:
        """Events stay in metrics.jsonl."""

    def finish(self, summary: dict) -> None:
        self.writer.close()
