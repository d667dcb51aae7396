"""A run that was stopped goes on exactly. Why it matters: a resume that silently loses optimizer state, data position or
router bias costs weeks before anyone sees it.

Every case runs the real entry point in fresh processes. Not covered: resuming on another layout (refused, see
`test_refusals`), NCCL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megamoe.monitor.metrics import read_metrics
from megamoe.testing.small import small_run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


def _start(overrides: list[str], launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*launcher, "launch/pretrain.py", *overrides], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def _finish(process: subprocess.Popen, timeout_s: float = 120) -> tuple[int, str]:
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


def _losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(run_dir).rows if "loss" in row}


def _wait_for(condition, process: subprocess.Popen, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, _finish(process)[1]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run, and the folder whose caches every other case shares."""
    folder = tmp_path_factory.mktemp("resume")
    code, out = _finish(_start(small_run(folder, train__num_steps=STEPS, run__dir=folder / "straight")))
    assert code == 0, out
    return folder, _losses(folder / "straight")


def _lines(run_dir: Path) -> int:
    return sum(1 for row in read_metrics(run_dir).rows if "loss" in row) if (run_dir / "metrics.jsonl").is_file() else 0


def test_killed_run_continues_bit_for_bit(straight):
    folder, expected = straight
    run_dir = folder / "killed"
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir, checkpoint__interval_steps=3)
    process = _start(overrides)
    _wait_for(lambda: _lines(run_dir) >= 7, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (run_dir / "checkpoints" / "step_00000006").is_dir()
    code, out = _finish(_start(overrides))
    assert code == 0 and "continues from" in out, out
    assert _losses(run_dir) == expected


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_exits_zero(straight, signum):
    folder, expected = straight
    run_dir = folder / f"signal{signum}"
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir)
    process = _start(overrides)
    _wait_for(lambda: _lines(run_dir) >= 3, process)
    os.kill(process.pid, signum)
    if signum == signal.SIGINT:
        # Launchers send SIGTERM right behind: that is not a second press.
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
    code, out = _finish(process)
    assert code == 0, out
    saved = json.loads(next((run_dir / "checkpoints").glob("step_*/state.json")).read_text())["step"]
    assert saved == max(_losses(run_dir)) < STEPS
    code, out = _finish(_start(overrides))
    assert code == 0, out
    assert _losses(run_dir) == expected


def test_two_ranks_under_torchrun_stop_and_continue(straight):
    folder, expected = straight
    run_dir = folder / "torchrun"
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={29600 + os.getpid() % 300}")
    process = _start(overrides, torchrun)
    _wait_for(lambda: _lines(run_dir) >= 3, process)
    os.killpg(process.pid, signal.SIGINT)
    code, out = _finish(process)
    saved = json.loads(next((run_dir / "checkpoints").glob("step_*/state.json")).read_text())
    assert saved["step"] >= 3 and saved["world_size"] == 2, out
    code, out = _finish(_start(overrides, torchrun))
    assert code == 0, out
    losses = _losses(run_dir)
    assert losses.keys() == expected.keys()
    assert max(abs(losses[s][0] - expected[s][0]) for s in losses) < 1e-4
