"""The whole path, from configuration to checkpoint, on parallel layouts. Why it matters: the proof of the layouts stops at
the step; data, counting, evaluation, logging and saving can each be wrong on ranks that read the same batch.

Runs the trainer in float64 on gloo ranks. Not covered: the launchers, NCCL; more pairs of layouts are in tests/checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.monitor.metrics import read_metrics
from megamoe.testing.pool import RankPool
from megamoe.testing.small import small_run

LAYOUTS = {"pp2_tp2_ep2": dict(parallel__pp=2, parallel__tp=2, parallel__ep=2), "cp2_dp2_ep4": dict(parallel__cp=2, parallel__ep=4)}


def _run(overrides: list[str]) -> int:
    from launch.schema import compose, to_dict
    from megamoe.train.run import pretrain

    config = compose(overrides)
    config.validate(4 if "parallel.ep" in " ".join(overrides) else 1)
    return pretrain(config, to_dict(config))


def _metrics(run_dir: Path) -> dict[int, dict]:
    return {row["step"]: row for row in read_metrics(run_dir).rows if "loss" in row}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    exact = dict(engine="plain", train__precision="fp64", train__num_steps=4, train__eval_interval_steps=2, train__eval_windows=5, monitor__log_interval_steps=1)
    with RankPool(4) as pool:
        pool.run(_run, 1, small_run(folder, **exact, run__dir=folder / "one"), timeout_s=200)
        for name, axes in LAYOUTS.items():
            pool.run(_run, 4, small_run(folder, **exact, **axes, run__dir=folder / name), timeout_s=300)
        # Stopped after two steps, then continued by other processes: a start ends what is left of the one before it.
        axes = next(iter(LAYOUTS.values()))
        again = {**exact, "optim__schedule": "constant", "optim__warmup_fraction": 0}
        pool.run(_run, 4, small_run(folder, **again, **axes, run__dir=folder / "straight"), timeout_s=300)
        pool.run(_run, 4, small_run(folder, **{**again, "train__num_steps": 2}, **axes, run__dir=folder / "stopped"), timeout_s=300)
    with RankPool(4) as pool:
        # On the other layout there are two data-parallel ranks: the order of the data goes on as one rank's would.
        elsewhere = dict(run__dir=folder / "moved", run__resume=folder / "stopped/checkpoints/step_00000002")
        pool.run(_run, 4, small_run(folder, **again, **LAYOUTS["cp2_dp2_ep4"], **elsewhere), timeout_s=300)
        pool.run(_run, 4, small_run(folder, **again, **axes, run__dir=folder / "stopped"), timeout_s=300)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_logs_and_saves_what_one_rank_does(runs, name):
    one, other = _metrics(runs / "one"), _metrics(runs / name)
    assert one.keys() == other.keys() == {1, 2, 3, 4}
    for step, row in one.items():
        for key in ("loss", "grad_norm", "eval_loss", "eval_bits_per_byte", "maxvio_mean", "maxvio/3", "router_bias_max", "tokens"):
            assert (key in row) == (key in other[step]), (step, key)
            if key in row:
                assert other[step][key] == pytest.approx(row[key], rel=1e-9), (step, key)
    assert "eval_loss" in one[2] and "eval_loss" in one[4]
    _same_state(open_checkpoint(runs / "one/checkpoints"), open_checkpoint(runs / name / "checkpoints"))


def _same_state(a: Checkpoint, b: Checkpoint) -> None:
    assert a.step == b.step and a.names() == b.names() and a.state["progress"] == b.state["progress"]
    for name in a.names():
        torch.testing.assert_close(b.read(name), a.read(name), rtol=1e-8, atol=1e-10, msg=name)


def test_a_stopped_run_continues_exactly_on_its_layout(runs):
    assert _metrics(runs / "stopped").keys() == {1, 2, 3, 4}
    for step, row in _metrics(runs / "straight").items():
        assert (row["loss"], row["grad_norm"]) == tuple(_metrics(runs / "stopped")[step][k] for k in ("loss", "grad_norm")), step


def test_a_stopped_run_continues_on_another_layout_with_the_same_data(runs):
    assert _metrics(runs / "moved").keys() == {3, 4}
    for step, row in _metrics(runs / "moved").items():
        for key in ("loss", "grad_norm", "tokens"):
            assert row[key] == pytest.approx(_metrics(runs / "straight")[step][key], rel=1e-9), (step, key)
    _same_state(open_checkpoint(runs / "straight/checkpoints"), open_checkpoint(runs / "moved/checkpoints"))
