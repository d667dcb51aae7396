"""Dispatch through shared memory between CPU processes of one host: the twin of `cuda_ipc`, for proofs of its protocol.

Asked for by name only: it is no faster than gloo's all-to-all, it runs the phases of `peers.py` where there is no GPU.
"""

from __future__ import annotations

import functools
import os
import tempfile

import torch

from megamoe.ops.moe_dispatch import host, peers, reference


class SharedMemory:
    """Windows as files in memory, mapped by all; a file has no name any more once everybody has opened it."""

    device = "cpu"
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None

    def __init__(self) -> None:
        self._named: list[str] = []

    def make(self, num_bytes: int):
        descriptor, path = tempfile.mkstemp(prefix="megamoe-window-", dir=self.folder)
        os.ftruncate(descriptor, num_bytes)
        os.close(descriptor)
        self._named.append(path)
        return self._map(path, num_bytes), (path, num_bytes)

    def open(self, handle):
        return self._map(*handle)

    def _map(self, path: str, num_bytes: int) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    def opened(self) -> None:
        for path in self._named:
            os.unlink(path)
        self._named = []

    def make_report(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def sync(self) -> None:
        pass


def why_not(*, device="cpu", **_) -> str | None:
    """Why this backend cannot serve a call site, in words, or None."""
    return None if device == "cpu" else f"it moves rows between CPU processes, and tensors are on {device}; use cuda_ipc"


@functools.cache
def load():
    """Return `dispatch`: one for all layers, which share a group's windows."""
    return peers.backend("shared_memory", SharedMemory, lambda: host, reference.dispatch)
