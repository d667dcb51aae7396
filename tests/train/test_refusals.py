"""What a user can get wrong at start is one line, exit code 2, and nothing half-written. Runs the real `pretrain`.

The configuration's own mistakes are in tests/launch and tests/configs, those of the data in tests/data.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.checkpoint.format import xxh3
from megamoe.monitor.metrics import read_metrics
from megamoe.testing.pool import RankPool
from megamoe.testing.small import small_run
from megamoe.utils.errors import UserError

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


def _step(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_00000002"


def _attempt(run_dir: Path) -> Path:
    return next(p for p in _step(run_dir).iterdir() if p.is_dir())


def _data(run_dir: Path) -> Path:
    return next(_attempt(run_dir).glob("*.safetensors"))


def _edit(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _manifest(run_dir: Path, change) -> None:
    """Change the manifest as somebody would who can also write the hash of it."""
    path = _attempt(run_dir) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    _edit(_step(run_dir) / "commit.json", manifest_xxh3=xxh3(path.read_bytes()))


class _Bomb:
    """Whoever unpickles this leaves a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def _pickle(run_dir: Path, file: Path) -> None:
    file.write_bytes(pickle.dumps(_Bomb(run_dir / "pickle_ran")))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _first_form(run_dir: Path) -> None:
    shutil.rmtree(_attempt(run_dir))
    (_step(run_dir) / "commit.json").rename(_step(run_dir) / "state.json")


def _drop_optimizer(manifest: dict) -> None:
    manifest["tensors"] = {name: entry for name, entry in manifest["tensors"].items() if not name.startswith("optim/")}


# name: (damage to the run folder, overrides of the resume, words of the refusal)
CASES = {
    "newer format": (lambda run: _edit(_step(run) / "commit.json", format_version=99), {}, ["format version 99", "update"]),
    "older format": (lambda run: _manifest(run, lambda m: m.update(format_version=1)), {}, ["old format version 1"]),
    "first form": (_first_form, {}, ["old format version 1", "another run.dir"]),
    "torn pointer": (lambda run: (_step(run) / "commit.json").write_text("{"), {}, ["commit.json", "damaged"]),
    "torn manifest": (lambda run: _cut(_attempt(run) / "manifest.json"), {}, ["manifest.json", "hash"]),
    "corrupt byte": (lambda run: _flip(_data(run)), {}, ["hash", "damaged"]),
    "truncated file": (lambda run: _cut(_data(run)), {}, ["safetensors", "bytes", "damaged"]),
    "missing file": (lambda run: _data(run).unlink(), {}, ["safetensors", "missing"]),
    "pickled pointer": (lambda run: _pickle(run, _step(run) / "commit.json"), {}, ["pickle", "never opened"]),
    "pickled manifest": (lambda run: (_pickle(run, _attempt(run) / "manifest.json"), _edit(_step(run) / "commit.json", manifest_xxh3=xxh3((_attempt(run) / "manifest.json").read_bytes()))), {}, ["pickle", "never opened"]),
    "file outside": (lambda run: _manifest(run, lambda m: m["files"][0].__setitem__(0, "../../../config.json")), {}, ["manifest", "file name"]),
    "attempt outside": (lambda run: _edit(_step(run) / "commit.json", attempt="../other"), {}, ["names no attempt"]),
    "overlapping parts": (lambda run: _manifest(run, lambda m: m["tensors"]["model/model.norm.weight"]["parts"].append(m["tensors"]["model/model.norm.weight"]["parts"][0])), {}, ["model.norm.weight", "same place"]),
    "rubbish progress": (lambda run: _manifest(run, lambda m: m["state"].update(progress={"step": "__import__('os')"})), {}, ["where its run stood"]),
    "rubbish config": (lambda run: _manifest(run, lambda m: m["state"].update(config=["x"])), {}, ["config", "damaged"]),
    "weights only": (lambda run: _manifest(run, _drop_optimizer), {}, ["has no tensor optim/"]),
    "another window": (lambda run: None, {"train__seq_len": 32}, ["order", "train.seq_len"]),
    "another optimizer": (lambda run: None, {"optim": "adamw"}, ["optim.kind=adamw", "muon"]),
    "another precision": (lambda run: None, {"train__precision": "bf16"}, ["train.precision=bf16", "fp32"]),
    "an older one": (lambda run: shutil.copytree(_step(run), _step(run).with_name("step_00000009")), {"run__resume": "OLDER"}, ["step_00000009", "run.dir"]),
    "another model": (lambda run: None, {"model__d_model": 48}, ["another model"]),
    "another blend": (lambda run: None, {"data__holdout_fraction": 0.3}, ["blend", "run.allow_change"]),
    "never resume": (lambda run: None, {"run__resume": "never"}, ["run.resume=never"]),
    "no such checkpoint": (lambda run: None, {"run__resume": "/nowhere"}, ["/nowhere", "no committed checkpoint"]),
}


def _resume(overrides: list[str]) -> str:
    """What the run was refused with, in one of the pool's processes."""
    from launch.schema import compose, to_dict
    from megamoe.train.run import pretrain

    config = compose(overrides)
    config.validate(1)
    try:
        pretrain(config, to_dict(config))
    except UserError as error:
        return str(error)
    return "it trained"


@pytest.fixture(scope="module")
def pool():
    with RankPool(1) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_a_checkpoint_that_does_not_fit_is_refused_before_training(trained, pool, tmp_path, case):
    damage, values, words = CASES[case]
    run_dir = _copy(trained, tmp_path)
    damage(run_dir)
    values = {k: _step(run_dir) if v == "OLDER" else v for k, v in values.items()}
    before, rows = sorted((run_dir / "checkpoints").rglob("*")), len(read_metrics(run_dir).rows)
    (said,) = pool.run(_resume, 1, small_run(trained, **{"train__num_steps": 4, "engine": "plain", "run__dir": run_dir} | values))
    assert "\n" not in said and all(word in said for word in words), said
    assert sorted((run_dir / "checkpoints").rglob("*")) == before and len(read_metrics(run_dir).rows) == rows
    assert not (run_dir / "pickle_ran").exists(), "something of the checkpoint was unpickled"


def test_a_refused_checkpoint_is_one_line_and_exit_code_2(trained, tmp_path):
    run_dir = _copy(trained, tmp_path)
    _flip(_data(run_dir))
    code, out = _run(small_run(trained, train__num_steps=4, engine="plain", run__dir=run_dir))
    _refused(out, code, "hash", "damaged")


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
