"""What a user can get wrong at start is one line, exit code 2, and nothing half-written. Runs the real `pretrain`.

The configuration's own mistakes are in tests/launch and tests/configs, those of the data in tests/data.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.testing.small import small_run

ROOT = Path(__file__).resolve().parents[2]


def _run(overrides: list[str], **env: str) -> tuple[int, str]:
    full = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    done = subprocess.run([sys.executable, "launch/pretrain.py", *overrides], cwd=ROOT, env=full, text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished two-step run whose folder and caches the cases copy."""
    folder = tmp_path_factory.mktemp("refusals")
    code, out = _run(small_run(folder, train__num_steps=2, engine="plain"))
    assert code == 0, out
    return folder


def _copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


def _refused(out: str, code: int, *words: str) -> None:
    lines = [line for line in out.splitlines() if line and not line.startswith(("left out", "warning"))]
    assert code == 2, out
    assert len(lines) == 1, out
    for word in words:
        assert word in lines[0], out


def _state(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_00000002" / "state.json"


def _edit(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


CASES = {
    "newer format": (lambda run: _edit(_state(run), format_version=99), {}, ["format version 99", "update"]),
    "torn state": (lambda run: _state(run).write_text("{"), {}, ["state.json", "damaged"]),
    "corrupt byte": (lambda run: _flip(_state(run).parent / "rank_00000.safetensors"), {}, ["hash", "damaged"]),
    "missing file": (lambda run: (_state(run).parent / "rank_00000.safetensors").unlink(), {}, ["missing"]),
    "missing model": (lambda run: (_state(run).parent / "model.safetensors").unlink(), {}, ["model.safetensors", "missing"]),
    "torn model": (lambda run: (_state(run).parent / "model.safetensors").write_bytes(b"torn"), {}, ["model.safetensors", "damaged"]),
    "another window": (lambda run: None, {"train__seq_len": 32}, ["order", "train.seq_len"]),
    "another optimizer": (lambda run: None, {"optim": "adamw"}, ["optim.kind=adamw", "muon"]),
    "another engine": (lambda run: None, {"engine": "deepspeed"}, ["engine.kind=deepspeed", "plain"]),
    "an older one": (lambda run: shutil.copytree(_state(run).parent, _state(run).parent.with_name("step_00000009")), {"run__resume": "OLDER"}, ["step_00000009", "run.dir"]),
    "another model": (lambda run: None, {"model__d_model": 48}, ["another model"]),
    "another blend": (lambda run: None, {"data__holdout_fraction": 0.3}, ["blend", "run.allow_change"]),
    "never resume": (lambda run: None, {"run__resume": "never"}, ["run.resume=never"]),
    "no such checkpoint": (lambda run: None, {"run__resume": "/nowhere"}, ["/nowhere", "state.json"]),
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_a_checkpoint_that_does_not_fit_is_refused_before_training(trained, tmp_path, case):
    damage, values, words = CASES[case]
    run_dir = _copy(trained, tmp_path)
    damage(run_dir)
    values = {k: _state(run_dir).parent if v == "OLDER" else v for k, v in values.items()}
    before = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    code, out = _run(small_run(trained, **{"train__num_steps": 4, "engine": "plain", "run__dir": run_dir} | values))
    _refused(out, code, *words)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == before


def test_second_writer_is_refused_with_pid_and_host(trained, tmp_path):
    from megamoe.utils.runfolder import RunFolder

    holder = RunFolder(tmp_path / "run")
    code, out = _run(small_run(trained, engine="plain", run__dir=tmp_path / "run"))
    _refused(out, code, f"pid {os.getpid()}", "run.dir")
    holder.release()


def test_unwritable_run_folder_is_refused(trained, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    code, out = _run(small_run(trained, engine="plain", run__dir=blocker / "run"))
    _refused(out, code, "run.dir", "cannot be written")


@pytest.fixture
def tiny_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_full_disk_ends_in_one_line_and_no_half_checkpoint(trained, tiny_disk):
    code, out = _run(small_run(trained, engine="plain", run__dir=tiny_disk / "run", train__num_steps=2))
    assert code == 2 and "Traceback" not in out, out
    assert "could not be written" in out and "No space left" in out, out
    assert not list((tiny_disk / "run" / "checkpoints").glob("*"))


def test_orphan_of_an_earlier_start_is_killed(trained, tmp_path):
    from megamoe.utils.runfolder import RunFolder, register_rank, start_time

    orphan = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from megamoe.utils.runfolder import register_rank; register_rank({str(tmp_path)!r}, 1); import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    orphan.stdout.readline()
    register_rank(tmp_path, 0)
    assert start_time(orphan.pid)
    folder = RunFolder(tmp_path)
    assert folder.sweep_orphans() == [orphan.pid]
    assert orphan.wait(timeout=5) == -9
    folder.release()
