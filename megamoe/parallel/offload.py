"""Activations wait in host memory: what a layer saves for backward leaves the device and comes back one layer ahead.

    forward   layer n runs; every storage it saves is copied out on a side stream while layer n+1 runs; it is let go when
              layer n+1 has run
    backward  when layer n asks for its first tensor, its storages have been on their way since layer n+1 asked: layer n-1's
              start now

So at most two layers' saved tensors of a micro-batch are on the device besides what other owners hold. Whole storages travel,
once each, and views are made again with their offsets and strides: kernels see the same layout, and results stay bit for
bit what they were. Left on the device: parameters, the AttnRes rows (the bank holds them until the micro-batch ends
anyway), small storages, and storages of which a saved tensor is a sliver.

On a CPU the same code copies and waits for nothing. Idea: arXiv:2607.24653 sec. 5.2.2; code ours.

Limits: a saved tensor that is written in place afterwards is not noticed, as always with saved-tensor hooks. Pinned blocks are
rounded up to powers of two by torch's host allocator. Custom functions that keep tensors outside `save_for_backward` keep
them on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

# A storage travels only when the saved tensor is at least this share of it.
MIN_SHARE = 0.25


class ActivationOffload:
    """Makes the contexts in which layers run. One per rank.

    Args:
        device: where the model is.
        min_bytes: smaller storages stay.

    Attributes:
        bytes_out, bytes_back: copied from and to the device since construction.
    """

    def __init__(self, device: torch.device, min_bytes: int):
        self.device, self.min_bytes = device, min_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.bytes_out = self.bytes_back = 0

    @contextlib.contextmanager
    def layer(self, module: nn.Module, rows: Iterable[torch.Tensor], previous: _Layer | None) -> Iterator[_Layer]:
        """Run one layer's forward in it.

        Args:
            module: its parameters stay on the device.
            rows: tensors that others hold until the micro-batch's backward is over; they stay.
            previous: what the context of the layer before, of the same chunk and micro-batch, yielded. The first has None.
        """
        stays = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), *rows)}
        saved = _Layer(self, stays, previous)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
            yield saved
        saved.close()


class _Layer:
    """The storages that one layer saved in one micro-batch."""

    def __init__(self, offload: ActivationOffload, stays: set[int], previous: _Layer | None):
        self.offload, self.stays, self.previous = offload, stays, previous
        # Weak: entries live with the graph that asks for them, and know their layer.
        self.entries: weakref.WeakValueDictionary[tuple[int, int], _Entry] = weakref.WeakValueDictionary()
        self.copied: torch.cuda.Event | None = None
        self.held: list[torch.UntypedStorage] = []

    def pack(self, t: torch.Tensor):
        storage = t.untyped_storage()
        size = storage.nbytes()
        if t.device != self.offload.device or isinstance(t, nn.Parameter) or size < self.offload.min_bytes or t.numel() * t.element_size() < MIN_SHARE * size or storage.data_ptr() in self.stays:
            return t
        # The version tells a storage that was written since it was copied. Addresses are unique while `held` holds them.
        key = (storage.data_ptr(), t._version)
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = _Entry(self, self._copy_out(storage))
            self.held.append(storage)
        entry.waiting += 1
        return entry, t.dtype, t.storage_offset(), t.size(), t.stride()

    def _copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        source = _bytes(storage)
        self.offload.bytes_out += source.numel()
        if self.offload.stream is None:
            return source.clone()
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        self.offload.stream.wait_stream(torch.cuda.current_stream(self.offload.device))
        with torch.cuda.stream(self.offload.stream):
            host.copy_(source, non_blocking=True)
        return host

    def close(self) -> None:
        """The layer has run: let go of the layer before, whose copies had this one's time to finish."""
        if self.offload.stream is not None:
            self.copied = self.offload.stream.record_event()
        if self.previous is not None:
            self.previous.release()

    def release(self) -> None:
        """Nothing that runs after this call may reuse the storages before they are copied."""
        if self.copied is not None:
            torch.cuda.current_stream(self.offload.device).wait_event(self.copied)
        self.held = []

    def fetch(self) -> None:
        """Start bringing back what is still to be asked for. The host does not wait."""
        self.release()
        for entry in list(self.entries.values()):
            entry.fetch()


class _Entry:
    """One storage: in host memory until the graph is freed, on the device from its fetch until its last use."""

    def __init__(self, layer: _Layer, host: torch.Tensor):
        self.layer, self.host = layer, host
        self.waiting = 0
        self.here: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        if self.here is not None or self.waiting == 0:
            return
        offload = self.layer.offload
        # Allocated on the compute stream, to which it returns: the side stream only writes it, and is waited for.
        self.here = torch.empty(self.host.numel(), dtype=torch.uint8, device=offload.device)
        offload.bytes_back += self.host.numel()
        if offload.stream is None:
            self.here.copy_(self.host)
            return
        offload.stream.wait_stream(torch.cuda.current_stream(offload.device))
        with torch.cuda.stream(offload.stream):
            self.here.copy_(self.host, non_blocking=True)
        self.arrived = offload.stream.record_event()

    def take(self) -> torch.Tensor:
        self.waiting = max(1, self.waiting)  # a graph that is kept may ask again
        if self.here is None:
            self.layer.fetch()
        here = self.here
        if self.arrived is not None:
            torch.cuda.current_stream(self.layer.offload.device).wait_event(self.arrived)
        if self.layer.previous is not None:
            self.layer.previous.fetch()
            # Once per layer: a chain of layers would otherwise be held by its last one.
            self.layer.previous = None
        self.waiting -= 1
        if self.waiting == 0:
            self.here = self.arrived = None
        return here


def _unpack(saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    entry, dtype, offset, size, stride = saved
    return torch.empty(0, dtype=dtype, device=entry.layer.offload.device).set_(entry.take().untyped_storage(), offset, size, stride)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
