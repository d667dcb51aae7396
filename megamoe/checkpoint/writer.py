"""Write checkpoints: one `Writer` per process, and one of them commits.

    writer = Writer(Objects(place, create=True), step=200, attempt=new_attempt(), writer=rank)
    writer.add("model/model.norm.weight", values, offset=(0,), shape=(7168,))      # any number of boxes of any tensors
    piece = writer.close()
    commit(objects, step, attempt, [piece, …], state)                               # by one process, when all have closed

`write_checkpoint` does all of it for one process, streaming. Memory: the boxes of one file at a time.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from megamoe.checkpoint.boxes import pieces, shifted, slices
from megamoe.checkpoint.format import COMMIT, DTYPE_NAMES, FORMAT, FORMAT_VERSION, MANIFEST, Entry, Manifest, Part, step_folder, xxh3
from megamoe.checkpoint.objects import Objects, Taken

# A reader takes parts whole, so this bounds what it reads too much; files are what is uploaded, and retried, at once.
PART_BYTES = 64 << 20
FILE_BYTES = 256 << 20


def new_attempt() -> str:
    """Name of one try to save a step; no two tries share a file."""
    return uuid.uuid4().hex[:12]


class Writer:
    """Files of one process. `add` uploads whenever a file is full.

    Args:
        writer: number of the process among the writers of this attempt.
        file_bytes: tensors of one file; about three times as much memory is used while it is written.
    """

    def __init__(self, objects: Objects, step: int, attempt: str, writer: int = 0, *, file_bytes: int = FILE_BYTES):
        self.objects, self.writer, self.file_bytes = objects, writer, file_bytes
        self._base = f"{step_folder(step)}/{attempt}"
        self._manifest = Manifest(step, {})
        self._boxes: list[tuple[str, tuple, torch.Tensor]] = []
        self._bytes = 0
        self.bytes_written = 0

    def add(self, name: str, values: torch.Tensor, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> None:
        """One box of a tensor; boxes of all writers must fill each tensor exactly once.

        Args:
            values: CPU tensor, not changed before the next `add` or `close` returns.
            offset, shape: where it starts in the whole tensor, and the whole tensor's shape; a whole tensor by default.

        Raises:
            StoreError: a file could not be written.
        """
        shape = tuple(values.shape) if shape is None else tuple(shape)
        offset = (0,) * values.dim() if offset is None else tuple(offset)
        entry = self._manifest.tensors.setdefault(name, Entry(DTYPE_NAMES[values.dtype], shape))
        if (entry.dtype, entry.shape) != (DTYPE_NAMES[values.dtype], shape):
            raise ValueError(f"{name}: {values.dtype} {shape} after {entry.dtype} {entry.shape}")
        for piece in pieces(tuple(values.shape), PART_BYTES // values.element_size()):
            part = values[slices(piece, (0,) * values.dim())] if values.dim() else values
            self._boxes.append((name, shifted(piece, offset), part))
            self._bytes += part.numel() * part.element_size()
            if self._bytes >= self.file_bytes:
                self._flush()

    def _flush(self) -> None:
        if not self._boxes:
            return
        file = f"{self.writer:05d}-{len(self._manifest.files):04d}.safetensors"
        by_key = {f"{name}@{','.join(map(str, box[0]))}": (name, box, part) for name, box, part in self._boxes}
        # Clones: safetensors refuses tensors that share storage, and views of flat buffers do.
        data = save({key: part.detach().clone(memory_format=torch.contiguous_format) for key, (_, _, part) in by_key.items()})
        (header_bytes,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + header_bytes])
        view = memoryview(data)
        for key, (name, box, _) in by_key.items():
            begin, end = (8 + header_bytes + x for x in header[key]["data_offsets"])
            self._manifest.tensors[name].parts.append(Part(file, box, begin, end - begin, xxh3(view[begin:end])))
        self.objects.put(f"{self._base}/{file}", data)
        self._manifest.files[file] = (len(data), xxh3(data))
        self.bytes_written += len(data)
        self._boxes, self._bytes = [], 0

    def close(self) -> Manifest:
        """Upload the rest; returns this writer's piece of the manifest. Raises StoreError."""
        self._flush()
        return self._manifest


def commit(objects: Objects, step: int, attempt: str, written: Iterable[Manifest], state: dict[str, Any], metrics: dict[str, float] | None = None) -> Manifest:
    """Make a checkpoint exist: merge the writers' pieces, check that they are complete, write manifest and pointer.

    Args:
        state: JSON facts, see docs/checkpoint.md.
        metrics: for the choice of the best; kept in the pointer.

    Raises:
        ValueError: a tensor is not filled exactly once; nothing is committed.
        Taken: this step is committed already. StoreError: the place could not be written.
    """
    manifest = Manifest(step, state)
    for piece in written:
        manifest.merge(piece)
    manifest.check_complete()
    data = manifest.to_json()
    objects.put(f"{step_folder(step)}/{attempt}/{MANIFEST}", data)
    pointer = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "attempt": attempt, "manifest_xxh3": xxh3(data), "metrics": metrics or {}}
    name = f"{step_folder(step)}/{COMMIT}"
    try:
        objects.put(name, json.dumps(pointer).encode())
    except Taken:
        # When an answer is lost the store's client asks again, and meets its own object.
        if json.loads(objects.get(name)).get("attempt") != attempt:
            raise
    return manifest


def write_checkpoint(place: str | Path, step: int, tensors: Iterable[tuple[str, torch.Tensor]], state: dict[str, Any]) -> str:
    """A whole checkpoint from one process, e.g. a converter. Returns its location. Raises as `Writer` and `commit`."""
    objects, attempt = Objects(place, create=True), new_attempt()
    writer = Writer(objects, step, attempt)
    for name, values in tensors:
        writer.add(name, values)
    commit(objects, step, attempt, [writer.close()], state)
    return f"{objects.location}/{step_folder(step)}"
