"""Starting and ending the process group, whatever launched us. Environment variables are set by `launch/environment.py`."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megamoe.utils.errors import RunFailed, check


def pick_device(wanted: str) -> torch.device:
    """`cpu`, `cuda` or `auto` to this rank's device; sets it as the current one.

    LOCAL_RANK is the device's number: `launch/environment.py` has divided it by parallel.ranks_per_device.

    Raises:
        UserError: `cuda` on a machine without a usable GPU, or more local ranks than devices.
    """
    available = torch.cuda.is_available()
    check(wanted != "cuda" or available, "train.device", "cuda", "torch sees no GPU here; use train.device=cpu, or auto to take what there is")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    check(index < count, "LOCAL_RANK", index, f"this machine has {count} GPU(s): start that many ranks here, or let several share one with parallel.ranks_per_device")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group(device: torch.device, timeout_s: int, *, deepspeed: bool) -> Iterator[None]:
    """The default group for the time of a run: gloo on CPU, NCCL on GPUs.

    Collective: returns when every rank is there. On a clean exit all ranks meet at a barrier before the group is
    destroyed: without it gloo aborts now and then.

    Raises:
        UserError: the port of rank 0 is taken.
        RunFailed: ranks are missing after `timeout_s`, or a collective inside failed because another rank is gone.
    """
    if deepspeed:
        _switch_off_shm_comm()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = rendezvous(rank, world_size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device if backend == "nccl" else None)
        if deepspeed:
            import deepspeed as ds

            ds.init_distributed(dist_backend=backend, verbose=False, timeout=timeout, dist_init_required=False)
        yield
        dist.barrier()
    except RuntimeError as error:
        if isinstance(error, RunFailed) or not is_communication(error):
            raise
        raise RunFailed(f"a collective of start-up or closing failed, another rank is gone ({first_line(error)})", speaks=speaks_first(store, rank)) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rendezvous(rank: int, world_size: int, addr: str, port: int, timeout_s: float) -> dist.Store:
    """Meet at rank 0's store and wait until every rank has come. Collective over the world, before any process group.

    torch's own rendezvous ends in a traceback that names nobody, or waits inside the first collective.

    Raises:
        UserError: rank 0 cannot listen on the port.
        RunFailed: rank 0 cannot be reached, or ranks are missing, after `timeout_s`; rank 0 (or whoever cannot reach it) speaks.
    """
    where = f"MASTER_ADDR={addr} MASTER_PORT={port}"
    deadline = time.monotonic() + timeout_s
    # torchrun's agent keeps the store itself; then rank 0 is a client as well, and restarts share it.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves and not _reachable(addr, port, deadline):
        raise RunFailed(f"{where}: rank {rank} of {world_size} could not reach rank 0 there within {timeout_s:g} s; rank 0 is missing, or the address or a firewall is wrong")
    try:
        store = dist.TCPStore(addr, port, None, serves, timeout=datetime.timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError as error:
        taken = serves and "EADDRINUSE" in str(error)
        check(not taken, "MASTER_PORT", port, f"another process listens there on {addr} (world size {world_size}); end it, or choose another port (deepspeed --master_port, torchrun --master-port)")
        raise RunFailed(f"{where}: rank {rank} of {world_size} met no store of ours there ({first_line(error)}); choose another port", speaks=True) from error
    store = dist.PrefixStore(f"megamoe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"here/{rank}", socket.gethostname())
    store.add("arrived", 1)
    while (arrived := store.add("arrived", 0)) < world_size:
        if time.monotonic() > deadline:
            missing = [r for r in range(world_size) if not store.check([f"here/{r}"])]
            raise RunFailed(
                f"{where}: {arrived} of {world_size} ranks came within {timeout_s:g} s, missing: {_ranges(missing)}; look at their logs, "
                f"start all with the same world size, or wait longer with parallel.timeout_s", speaks=speaks_first(store, rank))  # fmt: skip
        time.sleep(0.05 if world_size <= 64 else 0.5)
    return store


def _reachable(addr: str, port: int, deadline: float) -> bool:
    """Knock until somebody listens. torch's client prints two stack traces of C++ for each failed try, this prints nothing."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection((addr, port), timeout=max(1.0, deadline - time.monotonic())):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def speaks_first(store: dist.Store, rank: int) -> bool:
    """Whether this rank is the first to report a fault that all have met. Where the store is gone with rank 0, rank 1 speaks."""
    try:
        return store.add("megamoe/spoken", 1) == 1
    except RuntimeError:
        return rank == 1


def is_communication(error: RuntimeError) -> bool:
    """Whether an error says that another rank did not take part in a collective."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(word in text for word in ("gloo", "Timed out", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def first_line(error: BaseException) -> str:
    """The first line of an error's text; torch appends a C++ stack trace."""
    return str(error).strip().partition("\n")[0][:200]


def _ranges(ranks: list[int]) -> str:
    """`[0, 1, 2, 7]` as `0-2, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _switch_off_shm_comm() -> None:
    """DeepSpeed's CPU shared-memory op compiles for a minute at start and leaks 66 MiB of /dev/shm per rank and run.

    Training never calls it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
