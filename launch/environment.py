"""Who am I among the ranks, and with what settings do torch and DeepSpeed start?

A run is started by `deepspeed`, `torchrun`, `srun`, `mpirun` or plain `python`. torch.distributed and DeepSpeed want
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; only the first two launchers set them. `read_launch` finds
the facts whoever started us, `export` writes them down for the libraries. No torch import in this file.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import socket
import tempfile
import time
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megamoe.utils.errors import UserError
from megamoe.utils.redact import redact_text

DEEPSPEED_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """This process among the ranks of the run.

    Attributes:
        launcher: who started us, for the first screen: python, deepspeed, torchrun, slurm, openmpi or environment.
        rank, local_rank: 0-based, over all nodes and on this one.
        world_size, local_world_size: ranks over all nodes and on this one.
        master_addr, master_port: where rank 0 listens; port 0 means that a free one is still to be chosen.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Find out who started this process. Pure: reads the mapping and nothing else.

    Raises:
        UserError: a launcher's variables are incomplete, not numbers, or do not name the host of rank 0.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torch_variables(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_openmpi(environ)
    # Only tasks of srun have a step with a task count. A batch script has SLURM_PROCID=0 and SLURM_NTASKS=N too, but
    # what it starts by plain python is one process, which would wait for N-1 others for ever.
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return _from_slurm(environ)
    return Launch("python", 0, 0, 1, 1, "127.0.0.1", 0)


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = environ.get(key)
    if value is None:
        if default is None:
            raise UserError(f"{key}: not set, although other variables of a launcher are; use deepspeed, torchrun or srun, or set it")
        return default
    if not value.isdecimal():
        raise UserError(f"{key}={value}: must be a whole number, zero or above; it is set by the launcher")
    return int(value)


def _checked(launch: Launch) -> Launch:
    if not launch.rank < launch.world_size:
        raise UserError(f"RANK={launch.rank}: must lie below WORLD_SIZE={launch.world_size}; unset both to run a single process")
    return launch


def _from_torch_variables(environ: Mapping[str, str]) -> Launch:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher, local_world = "torchrun", _number(environ, "LOCAL_WORLD_SIZE", 1)
    elif "CROSS_SIZE" in environ and "LOCAL_SIZE" in environ:
        launcher, local_world = "deepspeed", _number(environ, "LOCAL_SIZE")
    else:
        launcher, local_world = "environment", _number(environ, "LOCAL_WORLD_SIZE", 1)
    addr = environ.get("MASTER_ADDR", "127.0.0.1" if world == local_world else "")
    if not addr:
        raise UserError(f"MASTER_ADDR: not set for {world} ranks; set it to the host of rank 0")
    port = _number(environ, "MASTER_PORT", 0 if world == 1 else DEEPSPEED_DEFAULT_PORT)
    # The deepspeed launcher gives every run the same port. A second run on the machine would not only fail: its ranks
    # join the first run's store and abort it. torchrun keeps its own store on its port, so there it must stay.
    if launcher == "deepspeed" and world == local_world and port == DEEPSPEED_DEFAULT_PORT:
        port = 0
    return _checked(Launch(launcher, rank, _number(environ, "LOCAL_RANK", 0), world, local_world, addr, port))


def _from_openmpi(environ: Mapping[str, str]) -> Launch:
    rank, world = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_world = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    addr = environ.get("MASTER_ADDR", "127.0.0.1" if world == local_world else "")
    if not addr:
        raise UserError(f"MASTER_ADDR: not set for {world} ranks on several nodes; start with mpirun -x MASTER_ADDR=<host of rank 0>")
    port = _number(environ, "MASTER_PORT", 0 if world == 1 else _port_of(environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))))
    return _checked(Launch("openmpi", rank, _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0), world, local_world, addr, port))


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    addr = environ.get("MASTER_ADDR")
    if not addr:
        hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
        addr = first_host(hosts) if nodes > 1 else "127.0.0.1"
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    port = _number(environ, "MASTER_PORT", 0 if world == 1 else _port_of(job))
    return _checked(Launch("slurm", rank, _number(environ, "SLURM_LOCALID", 0), world, _tasks_here(environ, world, nodes), addr, port))


def _tasks_here(environ: Mapping[str, str], world: int, nodes: int) -> int:
    """Tasks on this node from Slurm's run-length list: `4(x2),3` is 4, 4 and 3 on three nodes."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for part in filter(None, listed.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else max(1, world // nodes)


def first_host(hosts: str) -> str:
    """The first name of a Slurm host list: `gpu[003-008,11],login` is gpu003.

    Raises:
        UserError: the list is empty or not of that form.
    """
    found = re.match(r"([^,\[\]\s]+)(?:\[(\d+)[^\]]*\]([^,\[\]\s]*))?", hosts.strip())
    if not found:
        raise UserError(f"SLURM_STEP_NODELIST={hosts!r}: no host name in it; set MASTER_ADDR to the host of rank 0")
    return found[1] + (found[2] or "") + (found[3] or "")


def _port_of(job: str) -> int:
    """A port that all ranks of a job compute alike and that another job on the machine rarely shares."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def export(launch: Launch, environ: MutableMapping[str, str], *, ranks_per_device: int = 1, port_timeout_s: float = 60.0) -> Path | None:
    """Write what torch.distributed, DeepSpeed and OpenMP read. Call once, before torch is imported.

    LOCAL_RANK becomes the number of the device: torch and DeepSpeed read it as that and as nothing else. With
    `ranks_per_device` N, local ranks 0 to N-1 share device 0, the next N device 1. NCCL allows this from 2.30 on, if told.

    What somebody has set stays. OMP_NUM_THREADS is this process's share of the usable cores: torch's default, all cores
    in every rank, makes eight ranks several times slower than one. OMP_WAIT_POLICY is passive: by default OpenMP's
    threads spin while they wait, and where another process wants the core (a loader, a second rank, a neighbour) each
    parallel region then costs a time slice. Default run on two cores beside other work: 40–110 tokens/s spinning,
    500–1,200 passive, the same losses.

    Returns:
        the file by which rank 0 told its port to the others, removed at a normal exit; None where there is none.
    """
    note = None
    port = launch.master_port or (free_port() if launch.world_size == 1 else 0)
    if not port:
        port, note = _agree_on_port(launch, port_timeout_s)
    environ["RANK"] = str(launch.rank)
    environ["LOCAL_RANK"] = str(launch.local_rank // ranks_per_device)
    if ranks_per_device > 1:
        environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        environ.setdefault("NCCL_NVLS_ENABLE", "0")
    environ["WORLD_SIZE"] = str(launch.world_size)
    environ.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))
    environ["MASTER_ADDR"] = launch.master_addr
    environ["MASTER_PORT"] = str(port)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // launch.local_world_size)))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return note


def same_command(launch: Launch, argv: list[str]) -> str:
    """The command that starts this run again, to copy. Ranks do not see their launcher's own options: on several nodes, and
    under a launcher with many, it is said in words where they go."""
    script = shlex.join(["launch/pretrain.py", *(redact_text(word) for word in argv if not word.startswith(("--local_rank", "--local-rank")))])
    many = launch.world_size > launch.local_world_size
    if launch.launcher == "slurm":
        return f"sbatch launch/slurm/pretrain.sbatch {script.partition(' ')[2]}".strip() + f"  (with the options of job {os.environ.get('SLURM_JOB_ID', '?')}, or scontrol requeue it)"
    if launch.launcher == "openmpi":
        return f"mpirun -np {launch.world_size} python {script}"
    if launch.launcher == "python":
        return f"python {script}"
    if launch.launcher == "deepspeed":
        return f"deepspeed --hostfile=… {script}" if many else f"deepspeed --num_gpus {launch.world_size} {script}"
    if launch.launcher == "torchrun":
        return f"torchrun --nnodes … {script}  (on every node)" if many else f"torchrun --nproc-per-node {launch.world_size} {script}"
    return f"the same command on every node: … {script}"


def choose_accelerator(device: str, environ: MutableMapping[str, str]) -> None:
    """Tell DeepSpeed to work on the CPU where the run does: it looks for itself, and a GPU beside a CPU run misleads it.

    Imports torch. `device` is `auto`, `cpu` or `cuda`.

    Raises:
        UserError: a GPU was asked for and torch sees none.
    """
    import torch

    gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not gpu:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise UserError(f"train.device=cuda: {why}; use train.device=auto or cpu")
    if not gpu:
        environ["DS_ACCELERATOR"] = "cpu"


def usable_cores(cgroup_quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may keep busy: its affinity mask, cut by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup_quota.read_text().split()[:2]
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def _agree_on_port(launch: Launch, timeout_s: float) -> tuple[int, Path | None]:
    """Ranks of one launcher on one machine agree on a free port: rank 0 picks it and leaves it in a file.

    The file is named after the launcher's process, which all ranks share and no other run has (its start time tells
    apart a later process of the same number). Rank 0 removes it when it ends.
    """
    parent = os.getppid()
    note = Path(tempfile.gettempdir()) / f"megamoe-port-{os.getuid()}-{parent}-{_start_time(parent)}"
    if launch.rank == 0:
        port = free_port()
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(str(port))
        draft.replace(note)
        atexit.register(note.unlink, missing_ok=True)
        return port, note
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            # /tmp is shared: believe only a note of our own user.
            if note.stat().st_uid == os.getuid():
                return int(note.read_text()), None
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    raise UserError(f"MASTER_PORT: rank 0 did not choose one within {timeout_s:.0f} s; give one with deepspeed --master_port")


def _start_time(pid: int) -> str:
    """Clock ticks since boot at which a process started, where the system tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
