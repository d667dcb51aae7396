"""A checkpoint of ours or a release's folder, opened for looking: names, dtypes, shapes, and rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from megamoe.checkpoint.format import DTYPES
from megamoe.checkpoint.hf.files import SafetensorsFolder
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.checkpoint.writer import PART_BYTES


class Opened:
    """One of the two.

    Attributes:
        kind: "megamoe" or "safetensors".
        location: for messages.
        specs: name -> (safetensors dtype, shape), in the order of the files for a release, else sorted.
        checkpoint, folder: what stands behind; the other is None.
    """

    def __init__(self, location: str | Path):
        self.location = str(location)
        self.checkpoint: Checkpoint | None = None
        self.folder: SafetensorsFolder | None = None
        path = Path(location)
        if "://" not in self.location and path.is_dir() and any(path.glob("*.safetensors*")):
            self.kind, self.folder = "safetensors", SafetensorsFolder(path)
            self.specs = {name: (p.dtype, p.shape) for name, p in self.folder.places.items()}
        else:
            self.kind, self.checkpoint = "megamoe", open_checkpoint(location)
            self.specs = {name: (e.dtype, e.shape) for name, e in sorted(self.checkpoint.manifest.tensors.items())}

    def num_bytes(self, name: str) -> int:
        dtype, shape = self.specs[name]
        return math.prod(shape) * DTYPES[dtype].itemsize

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in slices along dim 0, of about a part's size: the cut of a tensor that was written whole."""
        dtype, shape = self.specs[name]
        if not shape or not math.prod(shape):
            yield self._read(name, shape, 0, shape[0] if shape else 1)
            return
        per_row = self.num_bytes(name) // shape[0]
        step = max(1, PART_BYTES // max(per_row, 1))
        for start in range(0, shape[0], step):
            yield self._read(name, shape, start, min(start + step, shape[0]))

    def _read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        if self.folder is not None:
            return self.folder.read(name, start, stop) if shape else self.folder.read(name)
        if not shape:
            return self.checkpoint.read(name)
        return self.checkpoint.read(name, (start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))
