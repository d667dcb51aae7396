"""Starting and ending the process group, whatever launched us. Environment variables are set by `launch/environment.py`."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megamoe.utils.errors import check


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

    On a clean exit all ranks meet at a barrier before the group is destroyed: without it gloo aborts now and then.
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
    dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
    try:
        if deepspeed:
            import deepspeed as ds

            ds.init_distributed(dist_backend=backend, verbose=False, timeout=timeout, dist_init_required=False)
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _switch_off_shm_comm() -> None:
    """DeepSpeed's CPU shared-memory op compiles for a minute at start and leaks 66 MiB of /dev/shm per rank and run.

    Training never calls it.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
