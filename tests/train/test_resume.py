"""A run that was stopped goes on exactly. Why it matters: a resume that silently loses optimizer state, data position or
router bias costs weeks before anyone sees it.

Every case runs the real entry point in fresh processes. Not covered: resuming on another layout (tests/checkpoint,
tests/parallel), kills at other moments (tools/prove_resume.py), NCCL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.monitor.metrics import read_metrics
from megamoe.parallel.distributed import free_port
from megamoe.testing.small import small_run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20


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


def _rows(run_dir: Path) -> int:
    return len(_losses(run_dir)) if (run_dir / "metrics.jsonl").is_file() else 0


def _saved(run_dir: Path) -> Checkpoint:
    return open_checkpoint(run_dir / "checkpoints")


def test_killed_run_continues_bit_for_bit(straight):
    folder, expected = straight
    run_dir = folder / "killed"
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir, checkpoint__interval_steps=5)
    process = _start(overrides)
    _wait_for(lambda: (run_dir / "checkpoints" / "step_00000010" / "commit.json").is_file(), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, out = _finish(_start(overrides))
    assert code == 0 and "continues from" in out, out
    assert _losses(run_dir) == expected


def test_signals_finish_the_step_save_and_exit_zero(straight):
    """SIGINT with SIGTERM right behind (what launchers send: not a second press), go on, SIGTERM alone, go on."""
    folder, expected = straight
    run_dir = folder / "signals"
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir)
    for wanted_rows, signals in ((3, [signal.SIGINT, signal.SIGTERM]), (6, [signal.SIGTERM])):
        process = _start(overrides)
        _wait_for(lambda: _rows(run_dir) >= wanted_rows, process)
        for signum in signals:
            os.kill(process.pid, signum)
            time.sleep(0.1)
        code, out = _finish(process)
        assert code == 0, out
        assert _saved(run_dir).step == max(_losses(run_dir)) < STEPS
    code, out = _finish(_start(overrides))
    assert code == 0, out
    assert _losses(run_dir) == expected


def _ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Pids of the ranks: the launcher's own children that run our entry point."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"launch/pretrain.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_stop_together_and_continue(straight, launcher):
    """torchrun: the ranks are signalled and the launcher ends with 0. deepspeed: the whole group is, as by Ctrl-C in a terminal;
    the launcher kills what still runs after 30 s and reports the interrupt itself, the save must be there within 20 s."""
    folder, expected = straight
    run_dir = folder / launcher
    overrides = small_run(folder, train__num_steps=STEPS, run__dir=run_dir)
    port = str(free_port())
    command = {
        "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"),
        "deepspeed": (sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port),
    }[launcher]
    process = _start(overrides, command)
    _wait_for(lambda: _rows(run_dir) >= 3, process)
    began = time.monotonic()
    if launcher == "torchrun":
        ranks = _ranks_of(process)
        assert len(ranks) == 2, ranks
        for pid in ranks:
            os.kill(pid, signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    code, out = _finish(process)
    assert time.monotonic() - began < 20 + 10, "the save takes 20 s at most; ten more for the launcher to notice"
    assert code == 0 or launcher == "deepspeed", out
    assert _saved(run_dir).step >= 3 and _saved(run_dir).state["layout"].startswith("2 ranks")
    code, out = _finish(_start(overrides, command))
    assert code == 0, out
    losses = _losses(run_dir)
    assert losses.keys() == expected.keys()
    assert max(abs(losses[s][0] - expected[s][0]) for s in losses) < 1e-4
