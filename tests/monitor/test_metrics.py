"""The record of a run survives crashes, resumes and full disks, and tells one story.

Why it matters: everything drawn or uploaded is rebuilt from it; a row counted twice or lost changes a curve.
Not covered: several writers at once (the run-folder lock refuses them), network file systems.
"""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from megamoe.monitor.metrics import LoadFile, MetricsFile, read_load, read_metrics


def write(run, attempt_from, steps, value, *, load=True):
    """One attempt: restored at `attempt_from`, then rows of loss=value and a load matrix filled with value."""
    file = MetricsFile(run, "id", attempt_from)
    loads = LoadFile(run, file.attempt)
    for step in steps:
        file.write("row", {"step": step, "loss": value})
        if load:
            loads.write(step, np.full((2, 3), int(value)))
    file.close()
    return file.attempt


def test_rows_after_the_restored_step_are_superseded_and_never_deleted(tmp_path):
    assert write(tmp_path, 0, range(1, 9), 1.0) == 1
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert write(tmp_path, 4, range(5, 7), 2.0) == 2
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    found = read_metrics(tmp_path)
    assert [(row["step"], row["attempt"]) for row in found.rows] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert (found.attempts, found.superseded) == (2, 4)
    steps, load_SLE = read_load(tmp_path)
    assert steps.tolist() == [1, 2, 3, 4, 5, 6] and load_SLE[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2]


def test_a_third_attempt_from_an_older_checkpoint_supersedes_both(tmp_path):
    write(tmp_path, 0, range(1, 5), 1.0)
    write(tmp_path, 4, range(5, 9), 2.0)
    write(tmp_path, 2, range(3, 4), 3.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path).rows] == [(1, 1.0), (2, 1.0), (3, 3.0)]


def test_without_a_restored_step_the_first_row_decides(tmp_path):
    write(tmp_path, 0, range(1, 9), 1.0)
    write(tmp_path, None, range(5, 7), 2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path).rows] == [(s, 1.0) for s in range(1, 5)] + [(5, 2.0), (6, 2.0)]


def test_an_attempt_that_died_before_its_first_row_supersedes_nothing_unless_it_says_so(tmp_path):
    write(tmp_path, 0, range(1, 5), 1.0)
    write(tmp_path, None, [], 2.0)
    assert len(read_metrics(tmp_path).rows) == 4
    write(tmp_path, 2, [], 2.0)
    assert len(read_metrics(tmp_path).rows) == 2


def test_training_and_evaluation_of_one_step_are_one_row(tmp_path):
    file = MetricsFile(tmp_path, "id", 0)
    file.write("row", {"step": 1, "loss": 3.0})
    file.write("row", {"step": 1, "eval_loss": 4.0})
    row = read_metrics(tmp_path).rows[0]
    assert (row["loss"], row["eval_loss"]) == (3.0, 4.0)


def test_a_line_torn_by_a_crash_costs_itself_only(tmp_path):
    write(tmp_path, 0, [1, 2], 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [r["step"] for r in read_metrics(tmp_path).rows] == [1]
    write(tmp_path, 1, [2, 3], 2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path).rows] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_a_load_record_torn_by_a_crash_costs_itself_only(tmp_path):
    write(tmp_path, 0, [1, 2], 1.0)
    path = tmp_path / "expert_load_2x3.bin"
    path.write_bytes(path.read_bytes()[:-5])
    assert read_load(tmp_path)[0].tolist() == [1]
    write(tmp_path, 1, [2], 7.0)
    steps, load_SLE = read_load(tmp_path)
    assert steps.tolist() == [1, 2] and (load_SLE[1] == 7).all() and load_SLE.shape == (2, 2, 3)


def test_every_row_is_on_disk_when_the_call_returns(tmp_path):
    file = MetricsFile(tmp_path, "id", 0)
    for step in (1, 2, 3):
        file.write("row", {"step": step, "loss": 1.0})
        assert read_metrics(tmp_path).rows[-1]["step"] == step


def test_a_row_after_a_full_disk_is_whole(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path, "id", 0)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    with pytest.raises(OSError, match="only 7 of"):
        file.write("row", {"step": 1, "loss": 1.0})
    monkeypatch.setattr(os, "write", real)
    file.write("row", {"step": 2, "loss": 2.0})
    assert [r["step"] for r in read_metrics(tmp_path).rows] == [2]


def test_lines_are_strict_json_and_non_finite_numbers_come_back(tmp_path):
    import torch

    file = MetricsFile(tmp_path, "id", 0)
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32(0.5), "e": torch.tensor(3), "f": np.int64(7), "g": True}
    file.write("row", {"step": 1, **values})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    row = read_metrics(tmp_path).rows[0]
    assert math.isnan(row["a"]) and (row["b"], row["c"], row["d"], row["e"], row["f"], row["g"]) == (math.inf, -math.inf, 0.5, 3, 7, True)


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is .* a run folder"):
        read_metrics(tmp_path)
    assert read_load(tmp_path) is None


def test_load_that_is_not_a_matrix_is_refused(tmp_path):
    with pytest.raises(ValueError, match="matrix"):
        LoadFile(tmp_path, 1).write(1, np.zeros(3))


def test_counts_of_a_large_batch_do_not_wrap(tmp_path):
    write(tmp_path, 0, [1], 0.0, load=False)
    LoadFile(tmp_path, 1).write(1, np.array([[2**32 - 1, 0]]))
    assert read_load(tmp_path)[1].tolist() == [[[2**32 - 1, 0]]]
