"""The command line answers mistakes at once, in one line, on one rank, with exit code 2.

Why it matters: a typing error on 512 ranks must not cost a minute of imports, print 512 tracebacks, or hang in a
process group. The entry point is started as a person starts it: a process of its own, with each launcher's arguments.
Not covered: training itself (tests/train), srun and mpirun as programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from launch.schema import compose, groups, to_dict

ROOT = Path(__file__).resolve().parents[2]
ENTRY = str(ROOT / "launch" / "pretrain.py")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "OMPI_", "TORCHELASTIC", "CROSS_"))}


def start(*args: str, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ENTRY, *args], env=CLEAN | (env or {}), cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def no_torch(tmp_path):
    """An environment in which importing torch is an error that names itself."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    return {"PYTHONPATH": str(tmp_path)}


def test_help_shows_groups_flags_and_examples_without_torch(no_torch):
    done = start("--help", env=no_torch)
    assert done.returncode == 0 and done.stderr == ""
    for group, names in groups().items():
        assert group in done.stdout and all(name in done.stdout for name in names)
    for part in ("deepspeed launch/pretrain.py", "torchrun", "--cfg job", "docs/config.md", "tiny*"):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_cfg_prints_a_configuration_that_reads_back(no_torch):
    done = start("--cfg", "job", "--resolve", "optim.lr=${optim.adam_eps}", "stage=cooldown_256k", env=no_torch)
    assert done.returncode == 0 and done.stderr == ""
    assert yaml.safe_load(done.stdout) == to_dict(compose(["optim.lr=1e-8", "stage=cooldown_256k"]))
    unresolved = start("--cfg", "job", "optim.lr=${optim.adam_eps}", env=no_torch)
    assert yaml.safe_load(unresolved.stdout)["optim"]["lr"] == "${optim.adam_eps}"


def test_cfg_shows_no_secret(no_torch):
    done = start("--cfg", "job", "data=indexed", "data.paths=['s3://me:hunter2@store/corpus']", env=no_torch)
    assert done.returncode == 0 and "hunter2" not in done.stdout and "s3://me:" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["optim.lrr=1"], "optim.lrr=1: unknown key (did you mean 'optim.lr'?)"),
        (["--cfg", "job", "optim.lr=-1"], "optim.lr=-1.0: must be"),
        (["parallel.dp=2"], "world size=1: the layout dp=2"),
        (["--foo"], "--foo: unknown flag"),
        (["--multirun", "optim.lr=1,2"], "--multirun: "),
        (["-m"], "--multirun: "),
        (["--cfg"], "command line: argument -c/--cfg: expected one argument"),
        (["--local_rank=0", "optim.lrr=1"], "optim.lrr=1: unknown key"),
        (["optim.lrr=1", "--local_rank=0"], "optim.lrr=1: unknown key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_without_torch(args, message, no_torch):
    done = start(*args, env=no_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"megamoe: {message}")


def test_a_mistake_answers_within_two_seconds():
    """CPU time, since the suite shares its cores: a loaded machine must not fail this."""
    before = os.times()
    assert start("optim.lrr=1").returncode == 2
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


def test_it_runs_from_any_folder_and_shadows_no_package(tmp_path, no_torch):
    """`launch/` must leave the import path: a package called `schema` or `environment` could be anybody's."""
    done = start("--cfg", "job", cwd=tmp_path, env=no_torch)
    assert done.returncode == 0 and "model:" in done.stdout
    probe = "import sys; sys.argv[0] = {0!r}; sys.path[0] = {1!r}; import runpy\ntry:\n    runpy.run_path({0!r}, run_name='__main__')\nexcept SystemExit: pass\nprint({1!r} in sys.path)"
    done = subprocess.run([sys.executable, "-c", probe.format(ENTRY, str(ROOT / "launch")), "--help"], env=CLEAN, capture_output=True, text=True)
    assert done.stdout.strip().endswith("False")


def test_only_rank_zero_speaks_and_every_rank_exits_2(no_torch):
    """Also when the launcher ends the others as soon as the first is gone."""
    ranks = []
    for rank in (1, 0, 2):
        env = CLEAN | no_torch | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
        ranks.append((rank, subprocess.Popen([sys.executable, ENTRY, f"--local_rank={rank}", "optim=adam"], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    first = next(p for rank, p in ranks if rank == 0)
    first.wait(timeout=60)
    time.sleep(0.5)
    for _, process in ranks:
        if process.poll() is None:
            process.terminate()
    for rank, process in ranks:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        assert err.count("\n") == (1 if rank == 0 else 0)


@pytest.fixture
def fake_run(tmp_path):
    """`launch.pretrain.main` with stand-ins for the trainer and for a torch that sees no GPU: the hand-over alone, in little time."""
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\nclass version:\n    cuda = None\n")

    def run(body: str, *args: str) -> subprocess.CompletedProcess:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import os, sys, types
                sys.path.insert(0, {str(ROOT)!r})
                import launch.pretrain as entry
                from megamoe.utils.errors import UserError
                run = types.ModuleType("megamoe.train.run")
                def pretrain(config, resolved):
                    {body}
                run.pretrain = pretrain
                sys.modules["megamoe.train.run"] = run
                sys.exit(entry.main(sys.argv[1:]))
                """
            )
        )
        return subprocess.run([sys.executable, str(script), *args], env=CLEAN, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run


def test_the_trainer_gets_the_config_its_plain_form_and_a_ready_environment(fake_run):
    done = fake_run(
        "print(config.optim.lr, resolved['optim']['lr'], resolved['optim']['kind'], os.environ['WORLD_SIZE'], os.environ['MASTER_PORT'] > '0', os.environ['DS_ACCELERATOR']); return 7",
        "optim.lr=0.5", "train.device=cpu", "--local_rank=0",
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["0.5", "0.5", "muon", "1", "True", "cpu"]


def test_the_trainers_user_errors_and_failures_are_one_line_and_other_errors_keep_their_traceback(fake_run):
    done = fake_run("raise UserError('data.paths=/x: no such file; name one')", "train.device=cpu")
    assert (done.returncode, done.stderr) == (2, "megamoe: data.paths=/x: no such file; name one\n")
    done = fake_run("from megamoe.utils.errors import RunFailed; raise RunFailed('rank 3 did not answer')", "train.device=cpu")
    assert (done.returncode, done.stderr) == (1, "megamoe: rank 0: rank 3 did not answer; resume from the last checkpoint with: python launch/pretrain.py train.device=cpu\n")
    done = fake_run("raise ZeroDivisionError('ours')", "train.device=cpu")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError: ours" in done.stderr


def test_a_gpu_that_is_not_there_is_one_line(fake_run):
    done = fake_run("return 0", "train.device=cuda")
    assert (done.returncode, done.stderr) == (2, "megamoe: train.device=cuda: this torch was built without CUDA; use train.device=auto or cpu\n")
