"""Runs that should be one run are told from runs that are not.

Why it matters: "within bf16 noise" is a verdict on a whole layout; it must come from figures and be able to fail.
"""

from __future__ import annotations

import json

import pytest

from megamoe.monitor.compare import compare_runs
from megamoe.monitor.metrics import MetricsFile
from tools.compare_runs import main


def write_run(folder, losses, norm=1.0):
    folder.mkdir()
    metrics = MetricsFile(folder, "r", 0)
    for step, loss in enumerate(losses, start=1):
        metrics.write("row", {"step": step, "loss": loss, "grad_norm": norm})
    metrics.close()
    return str(folder)


def test_distance_is_per_common_step(tmp_path):
    base = write_run(tmp_path / "one", [3.0, 2.0, 1.0])
    other = write_run(tmp_path / "ep4", [3.0, 2.5], norm=1.1)
    (distance,) = compare_runs(base, other)
    assert (distance.run, distance.steps, distance.max_at, distance.last_loss) == ("ep4", 2, 2, 2.5)
    assert distance.max_difference == pytest.approx(0.5) and distance.mean_difference == pytest.approx(0.25)
    assert distance.max_norm_ratio == pytest.approx(0.1)


def test_the_verdict_can_fail_and_the_picture_is_drawn(tmp_path, capsys):
    base = write_run(tmp_path / "one", [3.0, 2.0])
    noise = write_run(tmp_path / "noise", [3.001, 2.001])
    good = write_run(tmp_path / "tp2", [3.002, 2.002])
    bad = write_run(tmp_path / "cp2", [3.1, 2.1])
    picture = tmp_path / "p.png"
    assert main([base, noise, good, "--noise", noise, "--output", str(picture), "--json"]) == 0
    assert [d["run"] for d in json.loads(capsys.readouterr().out)] == ["noise", "tp2"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main([base, noise, good, bad, "--noise", noise]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.rstrip().endswith(": cp2") and "tp2 " in printed.out


def test_bad_folders_are_one_line(tmp_path, capsys):
    base = write_run(tmp_path / "one", [3.0])
    assert main([base, str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert main([base, str(tmp_path / "empty")]) == 2
    assert "no step in common" in capsys.readouterr().err
