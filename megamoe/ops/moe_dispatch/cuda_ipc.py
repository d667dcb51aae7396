"""Dispatch between processes of one host through each other's GPU memory: kernels store rows where experts read them.

The phases are those of `peers.py`, the kernels those of csrc/moe_dispatch over a table of mapped addresses. Windows are torch
tensors shared through CUDA IPC; their handles travel through the process group once. Ranks may share a GPU (under MPS: without it
they are time-sliced and every meeting costs a slice) or have one each with peer access.
"""

from __future__ import annotations

import functools
import os
import socket

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from megamoe.ops.moe_dispatch import cuda, peers
from megamoe.utils.errors import UserError


class DeviceMemory:
    """Windows in this rank's GPU memory."""

    device = "cuda"

    def make(self, num_bytes: int):
        window = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()  # zeros before any peer writes
        return window, reduce_tensor(window)

    def open(self, handle):
        rebuild, args = handle
        return rebuild(*args)

    def opened(self) -> None:
        pass

    def make_report(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def sync(self) -> None:
        torch.cuda.synchronize()


def why_not(*, device="cuda", **facts) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None. Who is on which host is seen at a group's first call."""
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return "memory of expandable segments has no CUDA IPC handle; take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF"
    return cuda.why_not(device=device, **facts)


def check_hosts(group) -> None:
    """Every rank of the group on this host, with a way to each other's memory. Collective.

    Raises:
        UserError: on every rank alike.
    """
    here = torch.cuda.current_device()
    cards = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(here).uuid), here)
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    hosts = sorted({host for host, _, _ in everyone})
    if len(hosts) > 1:
        raise UserError(f"model.moe.dispatch=cuda_ipc: ranks of one expert-parallel group are on {len(hosts)} hosts ({', '.join(hosts[:3])}…); use a parallel.ep that fits one host, or model.moe.dispatch=auto")
    # A handle names its device by the number that its owner gives it: all ranks must count their GPUs alike.
    unseen = [p for p, (_, uuid, index) in enumerate(everyone) if cards.get(uuid) != index or (index != here and not torch.cuda.can_device_access_peer(here, index))]
    told: list = [None] * len(everyone)
    dist.all_gather_object(told, unseen, group=group)
    pairs = [(p, q) for p, qs in enumerate(told) for q in qs]
    if pairs:
        raise UserError(f"model.moe.dispatch=cuda_ipc: of the pairs of ranks {pairs[:4]} the first cannot reach the GPU memory of the second (hidden by CUDA_VISIBLE_DEVICES, or no peer access); make all GPUs of the host visible to all ranks, or use model.moe.dispatch=auto")


@functools.cache
def load():
    """Load the extension and return `dispatch`: one for all layers, which share a group's windows."""
    alone = cuda.load()
    return peers.backend("cuda_ipc", DeviceMemory, lambda: torch.ops.megamoe, alone, check_hosts)
