"""What goes wrong before the first step is one line: no traceback, no secret. Why it matters: on many ranks the line is lost
among stack traces, and an error text ends up in logs that many people read. Not covered: NCCL's own start, several hosts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.schema import compose
from megamoe.parallel.distributed import _ranges, free_port, rendezvous
from megamoe.testing.small import small_run
from megamoe.utils.errors import RunFailed, UserError

ROOT = Path(__file__).resolve().parents[2]
ENTRY = str(ROOT / "launch" / "pretrain.py")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "OMPI_", "TORCHELASTIC", "CROSS_"))}
SECRET = "0a1B2c3D4e5F6a7B8c9D"


@pytest.mark.parametrize(
    "override",
    [
        f"monitor.wandb_api_key={SECRET}", "monitor.wandb_api_key=hunter2", f"+monitor.tokn=hf_{SECRET}", "+monitor.tokn=hunter2", "++monitor.apiKey=hunter2",
        f"monitor.anything={SECRET}", f"monitor.wandb=hf_{SECRET}", "monitor.password='hunter2", f"--api-key={SECRET}", "~monitor.secret=hunter2", "monitor.token=hunter2,hunter2",
        "monitor@x.token=hunter2", f"train.seq_len=sk-{SECRET}", f"train={{hf_token: hf_{SECRET}}}", "data.paths=[a],[https://me:hunter2@h/x]",
    ],
)  # fmt: skip
def test_a_secret_under_an_unknown_key_is_not_repeated(override, capsys, monkeypatch):
    from launch import pretrain

    monkeypatch.setattr(pretrain, "hold_sigterm", lambda held: None)
    assert pretrain.main([override], {}) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hunter2" not in said and SECRET not in said, said


def test_harmless_values_of_unknown_keys_are_repeated():
    for override in ("optim.lrr=1e-3", "train.sequence=2048", "run.folder=runs/long_name_of_a_run", "train.total_tokens=4000000000"):
        with pytest.raises(UserError) as caught:
            compose([override])
        assert str(caught.value).startswith(override), caught.value


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_while_torch_loads_is_one_line_and_exit_130(tmp_path, rank):
    """Even inside a library that catches everything."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.5)\nexcept:\n    pass\nprint('went on')\n")
    port_notes = tmp_path / "notes"
    port_notes.mkdir()
    env = CLEAN | {"PYTHONPATH": str(tmp_path), "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "TMPDIR": str(port_notes), "MASTER_PORT": "4000" if rank == "1" else "29500",
                   "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}  # fmt: skip
    done = subprocess.run([sys.executable, ENTRY, "train.device=auto"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.count("\n") == (1 if rank == "0" else 0) and "Traceback" not in done.stderr
    assert not list(port_notes.iterdir()), "the note of the port stays behind"


def _meet(ranks: list[int], world_size: int, timeout_s: float) -> dict[int, Exception | str]:
    port, results = free_port(), {}

    def rank_of(rank: int) -> None:
        try:
            store = rendezvous(rank, world_size, "127.0.0.1", port, timeout_s)
            stores.append(store)  # rank 0's holds the server: it must outlive the others
            results[rank] = "met"
        except Exception as error:
            stores.append(error.__traceback__)
            results[rank] = error

    stores: list[object] = []
    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in ranks]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    return results


def test_all_ranks_meet():
    assert _meet([2, 1, 0], 3, 20) == {0: "met", 1: "met", 2: "met"}


def test_missing_ranks_are_named_once():
    results = _meet([0, 1, 4], 6, 1)
    assert results.keys() == {0, 1, 4}
    for error in results.values():
        assert isinstance(error, RunFailed) and "3 of 6 ranks came within 1 s, missing: 2-3, 5" in str(error) and "MASTER_ADDR=127.0.0.1" in str(error)
    assert sum(error.speaks for error in results.values()) == 1


def test_a_port_that_is_taken_is_the_users_error():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(UserError, match=rf"MASTER_PORT={taken.getsockname()[1]}: another process listens there on 127.0.0.1 \(world size 2\).*--master_port"):
            rendezvous(0, 2, "127.0.0.1", taken.getsockname()[1], 5)


def test_an_absent_rank_zero_is_one_line_of_the_whole_program(tmp_path):
    port = str(free_port())
    env = CLEAN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, ENTRY, *small_run(tmp_path, parallel__timeout_s=1)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: rank 1 of 2 could not reach rank 0 there within 1 s" in done.stderr and "launch/pretrain.py model.vocab_size=512" in done.stderr


def test_ranks_are_listed_in_runs():
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
