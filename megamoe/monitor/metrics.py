"""The record of a run on disk: `metrics.jsonl` and the expert-load file. Everything drawn or uploaded comes from here.

`metrics.jsonl` holds one JSON object a line and is only ever appended to. Every line carries `kind`, `run_id`,
`attempt` and `time`:

    kind=attempt   a start of the run, counted from 1, with the step it restored
    kind=row       the metrics of one step (names in `ROW_KEYS`)
    kind=event     something that happened: saved, resumed, warning, …
    kind=summary   the end of an attempt

A resumed run repeats the steps after its checkpoint. The earlier rows stay in the file; `read_metrics` leaves them out.
The full (layer × expert) load matrix goes to `expert_load_<layers>x<experts>.bin` in fixed-size records of `load_dtype`,
which `numpy.fromfile` reads without this module: 83,000 series of one scalar each would drown any dashboard.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

METRICS_FILE = "metrics.jsonl"

ROW_KEYS: dict[str, str] = {
    "loss": "cross-entropy of the step in nats per target token, over the global batch",
    "bits_per_byte": "the same loss in bits per byte of text, comparable between tokenizers",
    "eval_loss": "cross-entropy on held-out windows, in nats per token",
    "eval_bits_per_byte": "the same in bits per byte: the figure that the reference lines are for",
    "lr": "learning rate of the step",
    "grad_norm": "global gradient norm before the clip",
    "tokens": "target tokens trained on since the run began",
    "tokens_per_s": "target tokens per second over all ranks",
    "step_time_s": "seconds of the step",
    "mfu": "model FLOPs per second as a fraction of the device's peak; absent where the peak is not known",
    "maxvio_mean": "largest expert load over the mean, minus 1, averaged over layers (0: perfectly balanced)",
    "maxvio_max": "the same, of the worst layer",
    "maxvio/<layer>": "the same, of one layer (0-based)",
    "router_bias_max": "largest absolute selection bias of any router",
    "mem_gib": "peak memory of rank 0's device in GiB",
}


class MetricsFile:
    """Appends to a run's `metrics.jsonl`, one flush per line, from one process.

    Args:
        run_dir: the run folder, existing.
        run_id: identity of the run, the same for every attempt.
        restored_step: step of the checkpoint this attempt continues (0: from scratch), or None when it is not known:
            then the step before the attempt's first row counts.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, run_dir: str | Path, run_id: str, restored_step: int | None = None):
        self.path = Path(run_dir) / METRICS_FILE
        self.run_id = run_id
        self.attempt = 1 + max((line.get("attempt", 0) for line in _lines(self.path)), default=0)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = not _ends_with_newline(self.path)
        self.write("attempt", {"restored_step": restored_step})

    def write(self, kind: str, values: dict) -> None:
        """Append one line. A process killed half-way, or a disk that fills up, costs that line and no other.

        Raises:
            OSError: the line could not be written in full.
        """
        head = {"kind": kind, "run_id": self.run_id, "attempt": self.attempt, "time": round(time.time(), 3)}
        line = (json.dumps(_json_safe(head | values)) + "\n").encode()
        if self._torn:
            line = b"\n" + line
        # One write call: O_APPEND then keeps the line whole.
        written = os.write(self._file, line)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes could be written")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass
class RunMetrics:
    """What `read_metrics` returns.

    Attributes:
        rows: metrics by step, ascending; superseded rows left out.
        events: events of all attempts, in the order in which they happened.
        summary: of the last attempt that reached its end, else empty.
        attempts: number of starts.
        superseded: number of rows left out.
    """

    rows: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    attempts: int = 0
    superseded: int = 0

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it is present."""
        found = [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]


def read_metrics(run_dir: str | Path) -> RunMetrics:
    """Read a run's record and resolve which attempt speaks for each step.

    Raises:
        FileNotFoundError: the folder has no `metrics.jsonl`.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; is {run_dir} a run folder?")
    found = RunMetrics()
    rows: list[dict] = []
    for line in _lines(path):
        kind = line.get("kind")
        if kind == "row":
            rows.append({key: _number(value) for key, value in line.items()})
        elif kind == "event":
            found.events.append(line)
        elif kind == "summary":
            found.summary = line
        elif kind == "attempt":
            found.attempts = max(found.attempts, line["attempt"])
    restored = _restored_steps(path, rows)
    kept = [row for row in rows if _speaks_for(row["attempt"], row["step"], restored)]
    by_step: dict[int, dict] = {}
    for row in kept:  # the training and the evaluation of one step may come as two lines
        by_step.setdefault(row["step"], {}).update(row)
    found.rows = [by_step[step] for step in sorted(by_step)]
    found.superseded = len(rows) - len(kept)
    return found


def _restored_steps(path: Path, rows: list[dict]) -> dict[int, int]:
    """Per attempt, the step it continued from. An attempt that neither says so nor wrote a row supersedes nothing."""
    restored: dict[int, int] = {}
    for line in _lines(path):
        if line.get("kind") == "attempt" and line.get("restored_step") is not None:
            restored[line["attempt"]] = line["restored_step"]
    for row in rows:
        restored.setdefault(row["attempt"], row["step"] - 1)
    return restored


def _speaks_for(attempt: int, step: int, restored: dict[int, int]) -> bool:
    return all(step <= start for later, start in restored.items() if later > attempt)


def _lines(path: Path):
    """The parseable lines of a file; a line torn by a crash is passed over."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _json_safe(value: object) -> object:
    """Numbers of numpy and torch become Python's; non-finite ones become strings, since strict JSON has no NaN."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _number(value: object) -> object:
    return float(value) if value in ("nan", "inf", "-inf") else value


def load_dtype(num_layers: int, num_experts: int):
    """Record of the expert-load file: attempt, step, and tokens per (MoE layer, expert) of that step's global batch."""
    import numpy as np

    return np.dtype([("attempt", "<u4"), ("step", "<u4"), ("load", "<u4", (num_layers, num_experts))])


class LoadFile:
    """Appends expert-load matrices of one shape; a record torn by a crash is cut off at the next start."""

    def __init__(self, run_dir: str | Path, attempt: int):
        self.run_dir, self.attempt = Path(run_dir), attempt

    def write(self, step: int, load_LE) -> None:
        """Append one (layers, experts) matrix of counts.

        Raises:
            OSError: the record could not be written.
            ValueError: not a matrix.
        """
        import numpy as np

        load_LE = np.asarray(load_LE)
        if load_LE.ndim != 2:
            raise ValueError(f"expert load must be a (layers, experts) matrix, got shape {load_LE.shape}")
        dtype = load_dtype(*load_LE.shape)
        path = self.run_dir / f"expert_load_{load_LE.shape[0]}x{load_LE.shape[1]}.bin"
        record = np.zeros(1, dtype)
        record["attempt"], record["step"], record["load"] = self.attempt, step, load_LE
        with open(path, "ab") as file:
            whole = file.tell() // dtype.itemsize * dtype.itemsize
            if whole != file.tell():
                file.truncate(whole)
            file.write(record.tobytes())


def read_load(run_dir: str | Path):
    """The expert load of a run by step, superseded records left out.

    Returns:
        steps_S: (S,) int64, ascending, and load_SLE: (S, layers, experts) uint32; or None when the run has none.
    """
    import numpy as np

    files = sorted(Path(run_dir).glob("expert_load_*x*.bin"), key=lambda p: p.stat().st_mtime)
    shapes = [re.fullmatch(r"expert_load_(\d+)x(\d+)\.bin", file.name) for file in files]
    if not files or shapes[-1] is None:
        return None
    dtype = load_dtype(int(shapes[-1][1]), int(shapes[-1][2]))
    records = np.fromfile(files[-1], dtype, count=files[-1].stat().st_size // dtype.itemsize)
    path = Path(run_dir) / METRICS_FILE
    restored = _restored_steps(path, [line for line in _lines(path) if line.get("kind") == "row"])
    kept = {int(r["step"]): i for i, r in enumerate(records) if _speaks_for(int(r["attempt"]), int(r["step"]), restored)}
    order = [kept[step] for step in sorted(kept)]
    return records["step"][order].astype(np.int64), records["load"][order]


def guarded(name: str, call: Callable[[], None], warn: Callable[[str], None]) -> bool:
    """Run a sink's call; a failure is told once through `warn` and returns False. The run goes on."""
    try:
        call()
        return True
    except Exception as error:  # noqa: BLE001 - whatever a sink does, training is worth more
        warn(f"{name} is switched off for the rest of this run: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return False
