"""One picture of a run, from its folder alone: no account, no server, no live process.

Top: bits per byte over the steps with the corpus's reference lines. Middle: learning rate, gradient norm, MaxVio per
layer. Bottom: which experts the tokens went to, at the first and at the latest record. Several runs may be laid over
each other; then the bottom row has the latest record of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megamoe.monitor.metrics import RunMetrics, read_load, read_metrics
from megamoe.monitor.screen import count

BASELINES_FILE = "baselines.json"
PLOT_FILE = "plot.png"

# Okabe and Ito's palette: told apart by every kind of colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
MAX_HEAT_MAPS = 4


@dataclass
class _Run:
    name: str
    colour: str
    metrics: RunMetrics
    load: tuple | None
    baselines: dict[str, float]


def plot_run(run_dir: str | Path, *others: str | Path, out: str | Path | None = None) -> Path:
    """Draw one run, or several over each other.

    Args:
        run_dir: run folder; `baselines.json` in it holds the reference lines in bits per byte.
        others: further run folders.
        out: the PNG; `plot.png` in the first run's folder when not given.

    Returns:
        path of the picture.

    Raises:
        FileNotFoundError: a folder without `metrics.jsonl`.
    """
    # Not pyplot: no global state, no window, and safe beside a live training loop.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folders = [Path(run_dir), *map(Path, others)]
    names = _names(folders)
    runs = [_open_run(folder, name, COLOURS[i % len(COLOURS)]) for i, (folder, name) in enumerate(zip(folders, names))]
    figure = Figure(figsize=(13, 10.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    has_load = any(run.load is not None for run in runs)
    top, middle, *bottom = figure.subfigures(3 if has_load else 2, 1, height_ratios=[4, 2.6, 2.8][: 3 if has_load else 2])
    _draw_quality(top.subplots(), runs)
    _draw_middle(middle.subplots(1, 3), runs)
    if has_load:
        _draw_load(bottom[0], runs)
    path = Path(out) if out is not None else folders[0] / PLOT_FILE
    draft = path.with_name(f".{path.name}.draft.png")
    figure.savefig(draft)
    draft.replace(path)
    return path


def _names(folders: Sequence[Path]) -> list[str]:
    """Last parts of the paths, as many as tell the runs apart."""
    for depth in (1, 2, 3):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _open_run(folder: Path, name: str, colour: str) -> _Run:
    baselines = {}
    if (folder / BASELINES_FILE).is_file():
        found = json.loads((folder / BASELINES_FILE).read_text())
        baselines = {key: float(value) for key, value in found.items() if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)}
    return _Run(name, colour, read_metrics(folder), read_load(folder), baselines)


def _draw_quality(axes, runs: list[_Run]) -> None:
    from matplotlib.ticker import MaxNLocator

    key, label = ("bits_per_byte", "bits per byte") if any(r.metrics.series("bits_per_byte")[0] for r in runs) else ("loss", "loss (nats per token)")
    values: list[float] = []
    for run in runs:
        steps, train = run.metrics.series(key)
        if steps:
            many = len(steps) > 30
            axes.plot(steps, train, color=run.colour, alpha=0.25 if many else 1.0, linewidth=0.9)
            if many:
                axes.plot(steps, _smooth(train), color=run.colour, linewidth=1.8)
            axes.plot([], [], color=run.colour, label=f"{run.name}: training, {_recent(train):.3f} at step {steps[-1]:,}")
            values += [v for v in train if math.isfinite(v)]
        steps, held_out = _held_out(run.metrics, "eval_" + key)
        if steps:
            axes.plot(steps, held_out, "o--", color=run.colour, markersize=5, linewidth=1, markerfacecolor="white", label=f"{run.name}: held out, {held_out[-1]:.3f}")
            values += [v for v in held_out if math.isfinite(v)]
    baselines = runs[0].baselines if key == "bits_per_byte" else {}
    if values or baselines:
        low, high = min([*values, *baselines.values()]), max([*values, *baselines.values()])
        margin = 0.06 * max(high - low, 1e-3)
        axes.set_ylim(low - margin, high + margin)
    _draw_references(axes, baselines)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_title(_title(runs), loc="left", fontsize=12, fontweight="bold")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no rows yet", transform=axes.transAxes, ha="center", color=GREY)


def _held_out(metrics: RunMetrics, key: str) -> tuple[list[int], list[float]]:
    """Evaluations by step; the one at the end of a run stands in its summary."""
    steps, values = metrics.series(key)
    last, value = metrics.summary.get("steps"), metrics.summary.get(key)
    if isinstance(last, int) and isinstance(value, (int, float)) and last > max(steps, default=-1):
        return [*steps, last], [*values, value]
    return steps, values


def _recent(values: list[float]) -> float:
    """Mean of the last fiftieth of the finite values: the last step alone is noise."""
    tail = [v for v in values if math.isfinite(v)][-max(1, len(values) // 50) :]
    return sum(tail) / len(tail) if tail else math.nan


def _title(runs: list[_Run]) -> str:
    rows = runs[0].metrics.rows
    if len(runs) > 1 or not rows:
        return "  ·  ".join(run.name for run in runs)
    parts = [runs[0].name, f"{rows[-1]['step']:,} steps"]
    tokens = runs[0].metrics.series("tokens")[1]
    if tokens:
        parts.append(f"{count(tokens[-1])} tokens")
    speed = runs[0].metrics.series("tokens_per_s")[1]
    if speed:
        parts.append(f"{count(sorted(speed)[len(speed) // 2])} tokens/s")
    if runs[0].metrics.attempts > 1:
        parts.append(f"{runs[0].metrics.attempts} starts")
    return "  ·  ".join(parts)


def _draw_references(axes, baselines: dict[str, float]) -> None:
    """Horizontal lines with their names outside on the right, moved apart where two lines lie close."""
    low, high = axes.get_ylim()
    gap = 0.045 * (high - low)
    label_at = -math.inf
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axes.axhline(value, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
        label_at = max(value, label_at + gap)
        axes.annotate(
            f"{name} {value:.3f}",
            xy=(1, value),
            xytext=(1.012, label_at),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=GREY,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
            annotation_clip=False,
        )


def _draw_middle(axes, runs: list[_Run]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    rate, norm, violation = axes
    for run in runs:
        rate.plot(*run.metrics.series("lr"), color=run.colour, linewidth=1.5)
        norm.plot(*run.metrics.series("grad_norm"), color=run.colour, linewidth=0.9)
    rate.set_title("learning rate", fontsize=10)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    rate.set_ylim(bottom=0)
    norm.set_title("gradient norm before the clip", fontsize=10)
    norms = [v for run in runs for v in run.metrics.series("grad_norm")[1] if v > 0 and math.isfinite(v)]
    if norms and max(norms) > 5 * min(norms):
        norm.set_yscale("log")
    violation.set_title("MaxVio: largest expert load / mean − 1", fontsize=10)
    layers = _layer_keys(runs[0].metrics)
    if len(runs) == 1 and layers:
        shades = colormaps["viridis"]
        for i, key in enumerate(layers):
            violation.plot(*runs[0].metrics.series(key), color=shades(i / max(1, len(layers) - 1) * 0.9), linewidth=0.9, alpha=0.8)
        violation.plot([], [], color=shades(0.0), label=f"layer {layers[0].partition('/')[2]}")
        if len(layers) > 1:
            violation.plot([], [], color=shades(0.9), label=f"layer {layers[-1].partition('/')[2]}")
        violation.plot(*runs[0].metrics.series("maxvio_mean"), color="black", linewidth=1.6, label="mean")
        violation.legend(fontsize=8, framealpha=0.9)
    else:
        violation.set_title("MaxVio, mean over layers: largest expert load / mean − 1", fontsize=10)
        for run in runs:
            violation.plot(*run.metrics.series("maxvio_mean"), color=run.colour, linewidth=1.5)
    violation.set_ylim(bottom=0)
    for panel in axes:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("step", fontsize=9)
        panel.tick_params(labelsize=8, which="both")
        panel.grid(alpha=0.25)


def _layer_keys(metrics: RunMetrics) -> list[str]:
    keys = {key for row in metrics.rows for key in row if key.startswith("maxvio/")}
    return sorted(keys, key=lambda key: (not key[7:].isdigit(), int(key[7:]) if key[7:].isdigit() else 0, key))


def _draw_load(figure, runs: list[_Run]) -> None:
    from matplotlib.colors import TwoSlopeNorm

    from megamoe.monitor.wandb_sink import utilisation

    panels = []
    for run in runs[:MAX_HEAT_MAPS]:
        if run.load is None or len(run.load[0]) == 0:
            continue
        steps, load_SLE = run.load
        picks = [0, len(steps) - 1] if len(runs) == 1 and len(steps) > 1 else [len(steps) - 1]
        panels += [(run, int(steps[i]), utilisation(load_SLE[i])) for i in picks]
    if not panels:
        return
    # White is the mean load, blue is idle, red is twice the mean or more: above that, how much more changes nothing.
    scale = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=2.0)
    image = None
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (run, step, load_LE) in zip(axes, panels):
        image = axis.imshow(load_LE, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=scale)
        axis.set_title(f"expert load, step {step:,}" if len(runs) == 1 else f"{run.name}, step {step:,}", fontsize=10)
        axis.set_xlabel("expert", fontsize=9)
        axis.set_ylabel("MoE layer", fontsize=9)
        # Rows are the MoE layers in order; the per-layer metrics know their numbers in the model.
        layers = [key.partition("/")[2] for key in _layer_keys(run.metrics)]
        ticks = _ticks(load_LE.shape[0])
        axis.set_yticks(ticks, [layers[i] for i in ticks] if len(layers) == load_LE.shape[0] else [str(i) for i in ticks])
        axis.tick_params(labelsize=8)
    bar = figure.colorbar(image, ax=list(axes), extend="max", shrink=0.9, pad=0.01)
    bar.set_label("load / mean of the layer", fontsize=9)
    bar.set_ticks([0, 0.5, 1, 1.5, 2])


def _ticks(n: int) -> list[int]:
    return list(range(0, n, max(1, -(-n // 12))))


def _smooth(values: list[float]) -> list[float]:
    """Mean over a fiftieth of the run around each step, less near the ends: centred, since a trailing mean lags a falling loss."""
    reach, out = max(1, len(values) // 50), []
    for i in range(len(values)):
        half = min(reach, i, len(values) - 1 - i)
        near = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if near else values[i])
    return out
