"""The first screen: what is about to run, on what, and where its traces go. One look must be enough to stop a wrong run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megamoe.ops.registry import Choice, status


@dataclass
class FirstScreen:
    """Facts of a run at its start. Empty ones are left out.

    Attributes:
        model: name of the model.
        parameters, active_parameters: parameters in all, and those that touch one token (embedding left out, head counted).
        layout: the mesh in words, `str(mesh)`; `launcher`: who started the ranks.
        device, precision, engine, optimizer: in words.
        tokens_per_step: tokens of one optimizer step over all ranks.
        seq_len, micro_batches, micro_batch_tokens: window, streams per rank and step, tokens of one stream.
        num_steps: length of the run; `resumed`: what it continues from, empty for a new run.
        data: lines that describe the corpus and the blend; `heldout`: what is evaluated.
        ops: choices of the op registry; None asks `ops.registry.status()`.
        features: (feature, taken, reason) of optional packages such as apex; see `utils.features`.
        run_dir: the run folder; `folders`: what else is where, `{"cache": "~/.cache/megamoe"}`.
        notes: anything else worth a line.
    """

    model: str
    parameters: int
    active_parameters: int
    layout: str
    device: str = ""
    precision: str = ""
    engine: str = ""
    optimizer: str = ""
    launcher: str = ""
    tokens_per_step: int = 0
    seq_len: int = 0
    micro_batches: int = 0
    micro_batch_tokens: int = 0
    num_steps: int = 0
    resumed: str = ""
    data: list[str] = field(default_factory=list)
    heldout: str = ""
    ops: list[Choice] | None = None
    features: list[tuple[str, str, str]] = field(default_factory=list)
    run_dir: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str]]:
        """The screen as (label, text); a continued entry has an empty label."""
        out: list[tuple[str, str]] = []
        _add(out, "model", [f"{self.model}: {count(self.parameters)} parameters, {count(self.active_parameters)} active per token"])
        _add(out, "layout", [self.layout + (f" (started by {self.launcher})" if self.launcher else "")])
        _add(out, "compute", [" · ".join(filter(None, (self.device, self.precision, self.engine, self.optimizer)))])
        if self.tokens_per_step:
            parts = f" = {self.micro_batches} × {self.micro_batch_tokens:,} a rank" if self.micro_batches else ""
            _add(out, "step", [f"{self.tokens_per_step:,} tokens{parts}, windows of {self.seq_len:,}"])
        if self.num_steps:
            total = f"{self.num_steps:,} steps, {count(self.num_steps * self.tokens_per_step)} tokens"
            _add(out, "run", [total + (f"; continues from {self.resumed}" if self.resumed else "")])
        _add(out, "data", [*self.data, f"held out: {self.heldout}" if self.heldout else ""])
        _add(out, "ops", op_lines(status() if self.ops is None else self.ops))
        _add(out, "features", _table(self.features))
        folders = ({"run": self.run_dir} if self.run_dir else {}) | self.folders
        _add(out, "folders", _table([(name, path, "") for name, path in folders.items()]))
        _add(out, "notes", self.notes)
        return out

    def text(self) -> str:
        """The screen as plain text."""
        return "\n".join(f"{label:<9} {text}".rstrip() for label, text in self.lines())


def count(n: int | float) -> str:
    """A count a person can hold: 4.31 M, 2.78 T; exact below ten thousand."""
    if n < 10_000:
        return f"{n:,.0f}"
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= scale:
            return f"{n / scale:.{2 if n < 100 * scale else 0}f} {unit}"
    return f"{n:,.0f}"


def _add(out: list[tuple[str, str]], label: str, texts: Iterable[str]) -> None:
    for i, text in enumerate(text for text in texts if text):
        out.append((label if i == 0 else "", text))


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    first, second = (max(len(str(row[i])) for row in rows) for i in (0, 1))
    return [f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]


def op_lines(choices: Iterable[Choice]) -> list[str]:
    """One aligned line per op: its backend, and why not another."""
    return _table(map(_op_row, choices))


def _op_row(choice: Choice) -> tuple[str, str, str]:
    reasons = "; ".join(f"{name}: {why}" if name else why for name, why in choice.reasons)
    return choice.op, choice.backend, f"({reasons})" if reasons else ""
