"""A run draws itself from its folder at any moment: before its first row, in the middle, after restarts.

Why it matters: the picture is what most people look at, and a plot that fails on an odd run fails when it is wanted.
Not covered: how it looks; open one.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megamoe.monitor.metrics import LoadFile, MetricsFile, read_metrics
from megamoe.monitor.plot import PLOT_FILE, _held_out, _names, _smooth, plot_run

ROOT = Path(__file__).resolve().parents[2]


def write(run, steps, *, layers=3, baselines=True, load=True):
    run.mkdir(exist_ok=True)
    file = MetricsFile(run, "id", 0)
    for step in steps:
        row = {"step": step, "loss": 5.0 / step, "bits_per_byte": 4.0 / step, "lr": 1e-3, "grad_norm": 1.0 / step, "tokens": 100 * step, "tokens_per_s": 9.0}
        file.write("row", row | {"maxvio_mean": 0.5, "maxvio_max": 1.0} | {f"maxvio/{i}": 0.1 * i for i in range(layers)})
        if load:
            LoadFile(run, 1).write(step, np.random.default_rng(step).integers(0, 9, (layers, 4)))
    file.close()
    if baselines:
        (run / "baselines.json").write_text(json.dumps({"unigram": 2.6, "bigram": 1.9, "gzip": 1.91, "xz": math.inf, "note": "text"}))
    return run


def is_png(path):
    data = path.read_bytes()
    return data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000


@pytest.mark.parametrize(
    "case", [dict(steps=range(1, 60)), dict(steps=[1]), dict(steps=[]), dict(steps=range(1, 5), baselines=False, load=False), dict(steps=range(1, 4), layers=0, load=False)],
    ids=["long", "one row", "no rows", "bare", "dense model"],
)
def test_any_run_can_be_drawn(tmp_path, case):
    run = write(tmp_path / "run", **case)
    assert plot_run(run) == run / PLOT_FILE and is_png(run / PLOT_FILE)
    assert not list(run.glob(".*draft*"))


def test_a_run_that_diverged_can_be_drawn(tmp_path):
    run = write(tmp_path / "run", [1, 2, 3])
    file = MetricsFile(run, "id", 3)
    file.write("row", {"step": 4, "loss": math.nan, "bits_per_byte": math.nan, "grad_norm": math.inf, "lr": 1e-3})
    assert is_png(plot_run(run))


def test_runs_can_be_laid_over_each_other(tmp_path):
    runs = [write(tmp_path / name, range(1, 5), layers=layers) for name, layers in (("a", 3), ("b", 5))]
    assert plot_run(*runs, out=tmp_path / "both.png") == tmp_path / "both.png" and is_png(tmp_path / "both.png")


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    assert _names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


def test_the_evaluation_at_the_end_is_a_point(tmp_path):
    run = write(tmp_path / "run", [1, 2])
    file = MetricsFile(run, "id", 2)
    file.write("row", {"step": 2, "eval_bits_per_byte": 3.0})
    file.write("summary", {"steps": 5, "eval_bits_per_byte": 2.0})
    assert _held_out(read_metrics(run), "eval_bits_per_byte") == ([2, 5], [3.0, 2.0])
    file.write("summary", {"steps": 2, "eval_bits_per_byte": 9.0})
    assert _held_out(read_metrics(run), "eval_bits_per_byte") == ([2], [3.0])


def test_smoothing_keeps_a_line_and_passes_over_gaps():
    assert _smooth([1.0, 2.0, 3.0, 4.0]) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert _smooth([1.0, math.nan, 3.0])[1] == 2.0
    assert _smooth([]) == []


def test_the_tool_prints_the_path_and_names_what_is_missing(tmp_path):
    run = write(tmp_path / "run", range(1, 4))
    tool = [sys.executable, str(ROOT / "tools" / "plot_run.py")]
    done = subprocess.run([*tool, str(run), "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["runs"][str(run)][0]["step"] == 3
    done = subprocess.run([*tool, str(tmp_path / "nothing")], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "is " in done.stderr
