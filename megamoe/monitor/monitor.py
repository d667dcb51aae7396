"""The one object that the trainer tells what happened. `metrics.jsonl` is the truth, every other sink a view of it.

Lives on rank 0 only, gets plain numbers on the host and never touches the device: the trainer's one host sync per log
interval stays its own. A sink that fails is switched off with one warning; training goes on.
"""

from __future__ import annotations

import time
from pathlib import Path

from megamoe.monitor.config import MonitorConfig, WandbMode
from megamoe.monitor.console import Console, clock_time
from megamoe.monitor.metrics import LoadFile, MetricsFile, guarded, read_load
from megamoe.monitor.screen import FirstScreen, op_lines
from megamoe.ops import registry
from megamoe.utils.errors import UserError
from megamoe.utils.redact import redact_text


class Monitor:
    """Sinks of one attempt of a run.

    Args:
        config: the monitor section.
        run_dir: the run folder, existing and locked by this process.
        resolved: the resolved configuration as plain values (`launch.schema.to_dict`); redacted before it leaves.
        run_id: identity of the run, the same for every attempt.
        restored_step: step of the checkpoint this attempt continues (0: from scratch). Rows that earlier attempts wrote
            after it are superseded. None: the step before the first row counts.
        console: replaces standard output, for tests.

    Raises:
        UserError: the run folder cannot be written.
    """

    def __init__(self, config: MonitorConfig, run_dir: str | Path, resolved: dict, run_id: str, *, restored_step: int | None = None, console: Console | None = None):
        self.config, self.run_dir, self.run_id = config, Path(run_dir), run_id
        self.console = console or Console(num_steps=resolved.get("train", {}).get("num_steps", 0))
        self.started = time.monotonic()
        try:
            self.file = MetricsFile(run_dir, run_id, restored_step)
        except OSError as error:
            raise UserError(f"run.dir={run_dir}: cannot be written ({error.strerror or error}); choose another with run.dir=…") from None
        self.attempt = self.file.attempt
        self._load_file = LoadFile(run_dir, self.attempt)
        self._file_failed = False
        self._ops_shown: set[str] | None = None
        self._sinks: dict[str, object] = {"console": self.console}
        self._open("W&B", lambda: self._wandb(resolved), wanted=config.wandb is not WandbMode.off)
        self._open("TensorBoard", self._tensorboard, wanted=config.tensorboard)

    def first_screen(self, facts: FirstScreen) -> None:
        """Show what is about to run. Where logs go is added here."""
        self._ops_shown = {choice.op for choice in (registry.status() if facts.ops is None else facts.ops)}
        facts.folders = {**facts.folders, "metrics": str(self.file.path), **self._places()}
        self._guard("console", lambda: self.console.first_screen(facts))

    def log(self, step: int, row: dict[str, float | int]) -> None:
        """Record one step.

        Args:
            step: 1 after the first optimizer step.
            row: names of `metrics.ROW_KEYS` and numbers on the host; None leaves a metric out.
        """
        row = {key: value for key, value in row.items() if value is not None}
        self._show_late_ops()
        self._write("row", {"step": step, **row})
        self._tell("log", step, row)

    def log_load(self, step: int, load_LE) -> None:
        """Record the global batch's tokens per (MoE layer, expert): nested lists or an array of counts."""
        if self._load_file is not None and not guarded("expert load file", lambda: self._load_file.write(step, load_LE), self._warn):
            self._load_file = None
        self._tell("log_load", step, load_LE, skip=("console",))

    def event(self, kind: str, message: str) -> None:
        """Record something that happened (`save`, `resume`, `warning`, `stop`, …) in one line; secrets in URLs are blanked."""
        message = redact_text(message)
        self._write("event", {"event": kind, "message": message})
        self._tell("event", kind, message)

    def finish(self, summary: dict) -> None:
        """Close every sink and leave the closing lines.

        Args:
            summary: figures of the end, such as steps, loss, eval_bits_per_byte; `plot` is the path of the PNG.
        """
        summary = {"wall_s": round(time.monotonic() - self.started, 3)} | summary
        self._write("summary", summary)
        self._guard("expert load archive", self._archive_load)
        for name in [n for n in self._sinks if n != "console"]:
            self._guard(name, lambda sink=self._sinks[name]: sink.finish(summary))
        self._guard("console", lambda: self.console.finish(_closing_lines(summary, self.run_dir)))
        self._sinks.clear()
        self.file.close()

    def _show_late_ops(self) -> None:
        """Ops that learn their device or shapes from the first batch are chosen after the first screen: say so then."""
        if self._ops_shown is None:
            return
        late = [choice for choice in registry.status() if choice.op not in self._ops_shown]
        self._ops_shown = None
        for line in op_lines(late):
            self.event("op", " ".join(line.split()))

    def _archive_load(self) -> None:
        """The whole load history as one compressed array file beside the appended records."""
        found = read_load(self.run_dir)
        if found is None:
            return
        import numpy as np

        draft = self.run_dir / "expert_load.draft.npz"
        np.savez_compressed(draft, step=found[0], load=found[1])
        draft.replace(self.run_dir / "expert_load.npz")

    def _wandb(self, resolved: dict):
        from megamoe.monitor.wandb_sink import WandbSink

        return WandbSink(self.config, self.run_dir, resolved, self.run_id)

    def _tensorboard(self):
        from megamoe.monitor.tensorboard_sink import TensorboardSink

        return TensorboardSink(self.run_dir)

    def _places(self) -> dict[str, str]:
        places = {}
        sink = self._sinks.get("W&B")
        if sink is not None:
            places["W&B"] = f"online at {sink.reason}" if sink.mode == "online" else f"{self.run_dir}/wandb, {sink.mode}: {sink.reason}"
        if "TensorBoard" in self._sinks:
            places["TensorBoard"] = str(self.run_dir / "tensorboard")
        return places

    def _open(self, name: str, build, *, wanted: bool) -> None:
        if wanted:
            guarded(name, lambda: self._sinks.__setitem__(name, build()), self._warn)

    def _tell(self, method: str, *args, skip: tuple[str, ...] = ()) -> None:
        for name in [n for n in self._sinks if n not in skip]:
            self._guard(name, lambda sink=self._sinks[name]: getattr(sink, method)(*args))

    def _guard(self, name: str, call) -> None:
        if not guarded(name, call, self._warn):
            self._sinks.pop(name, None)

    def _write(self, kind: str, values: dict) -> None:
        """The truth is worth every attempt: a full disk is told once, and rows are written again when there is room."""
        try:
            self.file.write(kind, values)
            self._file_failed = False
        except OSError as error:
            if not self._file_failed:
                self._file_failed = True
                self._say(f"warning: {self.file.path} cannot be written ({error.strerror or error}); rows are lost until it can")

    def _warn(self, message: str) -> None:
        self._write("event", {"event": "warning", "message": redact_text(message)})
        self._say(f"warning: {redact_text(message)}")

    def _say(self, message: str) -> None:
        try:
            self.console.event(*message.split(": ", 1))
        except Exception:  # noqa: BLE001 - a closed terminal must not end the run
            pass


def _closing_lines(summary: dict, run_dir: Path) -> list[str]:
    figures = [f"{key} {value:,.4f}" if isinstance(value, float) else f"{key} {value:,}" for key, value in summary.items()
               if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "wall_s"]
    lines = [f"done in {clock_time(summary['wall_s'])}" + (": " + "  ".join(figures) if figures else "")]
    if summary.get("plot"):
        lines.append(f"plot: {summary['plot']}")
    return [*lines, f"run folder: {run_dir}"]
