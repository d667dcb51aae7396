"""The first screen: what is about to run, on what, and where its traces go. One look must be enough to stop a wrong run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class FirstScreen:
    """Facts of a run at its start. Empty ones are left out.

    Attributes:
        model: name of the model.
        params_total, params_active: parameters in all, and those that touch one token (embedding left out, head counted).
        layout: axis → size, `{"dp": 2, "tp": 1, …}`.
        world_size, nodes: ranks of the run, and hosts they are on (0: not known).
        launcher: who started the ranks.
        tokens_per_step: tokens of one optimizer step over all ranks.
        seq_len, micro_batch_tokens, micro_batches: window, tokens of one packed stream, streams per rank and step.
        num_steps, start_step: length of the run, and the step it continues from.
        data: lines that describe the corpus and the blend.
        precision, device, engine, optimizer: in words.
        ops: (op, backend, reason) of every op choice; None asks `ops.registry.status()`.
        features: (feature, taken, reason) of optional packages such as apex; see `utils.features`.
        folders: what → where, `{"run": "runs/default", "cache": "~/.cache/megamoe"}`.
        notes: anything else worth a line.
    """

    model: str
    params_total: int
    params_active: int
    layout: dict[str, int]
    world_size: int = 1
    nodes: int = 0
    launcher: str = ""
    tokens_per_step: int = 0
    seq_len: int = 0
    micro_batch_tokens: int = 0
    micro_batches: int = 0
    num_steps: int = 0
    start_step: int = 0
    data: list[str] = field(default_factory=list)
    precision: str = ""
    device: str = ""
    engine: str = ""
    optimizer: str = ""
    ops: list[tuple[str, str, str]] | None = None
    features: list[tuple[str, str, str]] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[tuple[str, str]]:
        """The screen as (label, text); a continued entry has an empty label."""
        out: list[tuple[str, str]] = []
        _add(out, "model", [f"{self.model}: {count(self.params_total)} parameters, {count(self.params_active)} active per token"])
        axes = "  ".join(f"{axis}={size}" for axis, size in self.layout.items())
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        hosts = f" on {self.nodes} node{'s' * (self.nodes != 1)}" if self.nodes else ""
        _add(out, "layout", [f"{ranks}{hosts}: {axes}" + (f"  (started by {self.launcher})" if self.launcher else "")])
        _add(out, "compute", ["  ".join(filter(None, (self.device, self.precision, self.engine, self.optimizer)))])
        step = f"{self.tokens_per_step:,} tokens"
        if self.micro_batches:
            dp = self.layout.get("dp", 1)
            step += f" = {dp} dp × {self.micro_batches} micro-batches × {self.micro_batch_tokens:,}, windows of {self.seq_len:,}"
        _add(out, "step", [step])
        if self.num_steps:
            total = f"{self.num_steps:,} steps, {count(self.num_steps * self.tokens_per_step)} tokens"
            _add(out, "run", [total + (f"; continues from step {self.start_step:,}" if self.start_step else "")])
        _add(out, "data", self.data)
        _add(out, "ops", _table(_op_rows() if self.ops is None else self.ops))
        _add(out, "features", _table(self.features))
        _add(out, "folders", _table([(name, path, "") for name, path in self.folders.items()]))
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


def _op_rows() -> list[tuple[str, str, str]]:
    from megamoe.ops import registry

    rows = []
    for choice in registry.status():
        reasons = "; ".join(f"{name}: {why}" if name else why for name, why in choice.reasons)
        rows.append((choice.op, choice.backend, f"({reasons})" if reasons else ""))
    return rows
