"""How far runs that should be one run lie apart: the same model and data on other layouts, kernels or batch cuts.

Two runs of one seed in bf16 never agree to the bit once a sum is taken in another order. What counts as noise is
therefore measured, not assumed: a second run of the reference layout that only cuts its batch differently.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megamoe.monitor.metrics import read_metrics
from megamoe.monitor.plot import COLOURS, GREY


@dataclass(frozen=True)
class Distance:
    """One run beside the reference, over the steps that both have.

    Attributes:
        run: name of the run folder.
        steps: number of common steps.
        mean_difference, max_difference: absolute loss differences in nats per token.
        max_at: step of the largest one.
        max_norm_ratio: largest relative difference of the gradient norm before the clip.
        last_loss: loss of the last common step, nats per token.
    """

    run: str
    steps: int
    mean_difference: float
    max_difference: float
    max_at: int
    max_norm_ratio: float
    last_loss: float


def compare_runs(reference: str | Path, *others: str | Path) -> list[Distance]:
    """Distances of runs from a reference, in the order given.

    Raises:
        FileNotFoundError: a folder without `metrics.jsonl`.
        ValueError: a run that shares no step with the reference.
    """
    base, norm = _series(reference, "loss"), _series(reference, "grad_norm")
    distances = []
    for folder in others:
        loss, other_norm = _series(folder, "loss"), _series(folder, "grad_norm")
        steps = sorted(base.keys() & loss.keys())
        if not steps:
            raise ValueError(f"{folder}: no step in common with {reference}")
        differences = {step: abs(loss[step] - base[step]) for step in steps}
        max_at = max(steps, key=differences.__getitem__)
        ratios = [abs(other_norm[s] / norm[s] - 1) for s in steps if norm.get(s) and s in other_norm]
        distances.append(Distance(Path(folder).resolve().name, len(steps), sum(differences.values()) / len(steps), differences[max_at], max_at, max(ratios, default=0.0), loss[steps[-1]]))
    return distances


def table(reference: str | Path, distances: list[Distance]) -> str:
    head = f"{'run':<24} {'steps':>5} {'mean |Δloss|':>12} {'max |Δloss|':>12} {'at step':>7} {'max |Δnorm|':>11} {'last loss':>9}"
    base = _series(reference, "loss")
    lines = [head, f"{Path(reference).resolve().name:<24} {len(base):>5} {'reference':>12} {'':>12} {'':>7} {'':>11} {base[max(base)]:>9.4f}"]
    for d in distances:
        lines.append(f"{d.run:<24} {d.steps:>5} {d.mean_difference:>12.2e} {d.max_difference:>12.2e} {d.max_at:>7} {d.max_norm_ratio:>10.2%} {d.last_loss:>9.4f}")
    return "\n".join(lines)


def plot_comparison(path: str | Path, reference: str | Path, *others: str | Path, noise: str | Path | None = None) -> None:
    """Loss curves over each other, and below them each run's distance from the reference; `noise` is drawn grey."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    base = _series(reference, "loss")
    top.plot(list(base), list(base.values()), color="black", linewidth=2.6, alpha=0.35, label=Path(reference).resolve().name)
    for i, folder in enumerate(others):
        loss = _series(folder, "loss")
        is_noise = noise is not None and Path(folder).resolve() == Path(noise).resolve()
        style = {"color": GREY, "linestyle": "--"} if is_noise else {"color": COLOURS[i % len(COLOURS)]}
        top.plot(list(loss), list(loss.values()), linewidth=1.1, label=Path(folder).resolve().name + (" (noise)" if is_noise else ""), **style)
        steps = sorted(base.keys() & loss.keys())
        bottom.plot(steps, [max(abs(loss[s] - base[s]), 1e-9) for s in steps], linewidth=1.1, **style)
    top.set_ylabel("loss, nats per token")
    top.legend(fontsize=9)
    bottom.set(ylabel="|loss − reference|", xlabel="step", yscale="log")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
    figure.savefig(path)


def as_json(distances: list[Distance]) -> str:
    return json.dumps([asdict(d) for d in distances])


def _series(folder: str | Path, key: str) -> dict[int, float]:
    steps, values = read_metrics(folder).series(key)
    return dict(zip(steps, values))
