"""Whoever starts a run, each process finds the same facts about itself.

Why it matters: a rank that believes in another world waits for ever, and two runs on one port abort each other.
Not covered: real Slurm and Open MPI launchers (their variables are replayed here), several nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.environment import Launch, export, first_host, free_port, read_launch, usable_cores
from megamoe.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_plain_python_is_a_world_of_one():
    assert read_launch({"HOME": "/root"}) == Launch("python", 0, 0, 1, 1, "127.0.0.1", 0)


def test_torchrun_keeps_its_port():
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    assert read_launch(env) == Launch("torchrun", 3, 1, 4, 2, "n0", 29500)


def test_deepspeed_default_port_is_given_up_on_one_node_only():
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert read_launch(env) == Launch("deepspeed", 1, 1, 2, 2, "127.0.0.1", 0)
    assert read_launch(env | {"MASTER_PORT": "29501"}).master_port == 29501
    assert read_launch(env | {"WORLD_SIZE": "4", "CROSS_SIZE": "2", "MASTER_ADDR": "n0"}).master_port == 29500


def test_srun_maps_its_variables():
    env = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0",
    }
    launch = read_launch(env)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size, launch.local_world_size, launch.master_addr) == ("slurm", 5, 1, 7, 3, "gpu003")
    assert 20000 <= launch.master_port < 30000
    same_job = read_launch(env | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert same_job.master_port == launch.master_port
    assert read_launch(env | {"SLURM_JOB_ID": "813"}).master_port != launch.master_port


def test_plain_python_inside_a_batch_script_does_not_wait_for_ranks_nobody_starts():
    batch = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "gpu[003-004]"}
    assert read_launch(batch).world_size == 1


def test_a_launcher_inside_srun_wins():
    env = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_launch(env).launcher == "torchrun"


def test_mpirun_maps_its_variables():
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-7"}
    launch = read_launch(env)
    assert (launch.launcher, launch.rank, launch.world_size, launch.master_addr) == ("openmpi", 1, 2, "127.0.0.1")
    assert launch.master_port == read_launch(env | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port
    with pytest.raises(UserError, match="MASTER_ADDR: not set.*mpirun -x"):
        read_launch(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: not set"),
        ({"WORLD_SIZE": "2"}, "RANK: not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "RANK=2: must lie below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: not set for 2 ranks"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, "SLURM_STEP_NODELIST='': no host name"),
    ],
)
def test_incomplete_variables_are_named(env, message):
    with pytest.raises(UserError) as caught:
        read_launch(env)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-008,11],login", "gpu003"), ("rack1-[7]", "rack1-7"), ("a[1-2]-ib,b", "a1-ib"), ("login,gpu[1-2]", "login")],
)
def test_first_host_of_a_slurm_list(hosts, first):
    assert first_host(hosts) == first


def test_export_gives_a_free_port_and_a_share_of_the_cores():
    env: dict[str, str] = {}
    export(Launch("python", 0, 0, 1, 1, "127.0.0.1", 0), env)
    assert env["RANK"] == env["LOCAL_RANK"] == "0" and env["WORLD_SIZE"] == "1"
    assert int(env["MASTER_PORT"]) > 1024
    assert int(env["OMP_NUM_THREADS"]) == usable_cores()
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    many: dict[str, str] = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    export(Launch("torchrun", 1, 1, 512, 512, "127.0.0.1", 4000), many)
    assert (many["OMP_NUM_THREADS"], many["OMP_WAIT_POLICY"], many["MASTER_PORT"]) == ("3", "ACTIVE", "4000")
    del many["OMP_NUM_THREADS"]
    export(Launch("torchrun", 1, 1, 512, 512, "127.0.0.1", 4000), many)
    assert many["OMP_NUM_THREADS"] == "1"


def test_ranks_per_device_makes_local_rank_the_number_of_the_device():
    """torch, DeepSpeed and pick_device read LOCAL_RANK as the device, so it is divided before torch is imported."""
    devices = []
    for local_rank in range(4):
        env: dict[str, str] = {"NCCL_NVLS_ENABLE": "1"}
        export(Launch("torchrun", local_rank, local_rank, 4, 4, "127.0.0.1", 4000), env, ranks_per_device=2)
        devices.append(env["LOCAL_RANK"])
        assert (env["RANK"], env["LOCAL_WORLD_SIZE"], env["NCCL_MULTI_RANK_GPU_ENABLE"], env["NCCL_NVLS_ENABLE"]) == (str(local_rank), "4", "1", "1")
    assert devices == ["0", "0", "1", "1"]
    plain: dict[str, str] = {}
    export(Launch("torchrun", 1, 1, 4, 4, "127.0.0.1", 4000), plain)
    assert plain["LOCAL_RANK"] == "1" and "NCCL_MULTI_RANK_GPU_ENABLE" not in plain


def test_more_local_ranks_than_gpus_is_refused(monkeypatch):
    import torch

    from megamoe.parallel.distributed import pick_device

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1) and chosen == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"LOCAL_RANK=2: this machine has 2 GPU\(s\).*parallel.ranks_per_device"):
        pick_device("auto")


def test_a_container_quota_cuts_the_cores(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
    for text in ("max 100000\n", "junk"):
        quota.write_text(text)
        assert usable_cores(quota) >= usable_cores(tmp_path / "absent") >= 1


def test_two_runs_of_one_machine_never_share_a_port():
    """Two launchers at once, two ranks each: ranks of one agree, the launchers differ, and no note is left behind."""
    rank = (
        "import os, sys; from launch.environment import Launch, export; env = {};"
        "export(Launch('deepspeed', int(sys.argv[1]), int(sys.argv[1]), 2, 2, '127.0.0.1', 0), env); print(env['MASTER_PORT'], flush=True); sys.stdin.read()"
    )
    launcher = (
        "import subprocess, sys; pipe = subprocess.PIPE;"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}, str(r)], stdin=pipe, stdout=pipe, text=True) for r in (1, 0)];"
        "print([p.stdout.readline().strip() for p in ranks], flush=True); [p.communicate('') for p in ranks]"
    )
    both = [subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ports = [eval(p.communicate(timeout=60)[0]) for p in both]
    assert ports[0][0] == ports[0][1] and ports[1][0] == ports[1][1] and ports[0][0] != ports[1][0]
    import tempfile

    assert not [p for p in both if list(Path(tempfile.gettempdir()).glob(f"megamoe-port-{os.getuid()}-{p.pid}-*"))]


def test_a_missing_rank_zero_ends_the_wait():
    with pytest.raises(UserError, match="MASTER_PORT: rank 0 did not choose one"):
        export(Launch("deepspeed", 1, 1, 2, 2, "127.0.0.1", 0), {}, port_timeout_s=0.2)


def test_free_port_is_free():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
