"""Folders of safetensors files: every header before any data, then byte ranges; and writing files as streams.

Nothing is memory-mapped: pages of a map count as this process's memory, and a terabyte passes through here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megamoe.checkpoint.format import DTYPES
from megamoe.utils.errors import UserError, check

INDEX = "model.safetensors.index.json"
# A header of the whole K3 release in one file would be 80 MB; more than this is no header.
MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: file, safetensors dtype, shape, first byte in the file, bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


def read_header(path: Path) -> dict[str, Place]:
    """Tensors of one file. Reads the header only, and checks that its ranges fill the file without gap or overlap.

    Raises:
        UserError: no safetensors file, a truncated one, or a header that does not fit its file.
    """
    where = str(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            head = f.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
            check(0 < length <= min(size - 8, MAX_HEADER_BYTES), "file", where, f"is no safetensors file, or is cut off ({size} bytes)")
            raw = json.loads(f.read(length))
        data = 8 + length
        places = {}
        # Half a million tensors have a few dozen shapes and dtypes: one object of each.
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        file = path.name
        for name, entry in raw.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
            expected = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
            if end - begin != expected:
                raise ValueError(f"{name}: {end - begin} bytes for {entry['dtype']} {list(shape)}, expected {expected}")
            places[name] = Place(file, sys.intern(entry["dtype"]), shapes.setdefault(shape, shape), data + begin, end - begin)
    except OSError as error:
        raise UserError(f"file={where}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"file={where}: has no valid safetensors header ({str(error)[:160]})") from None
    end = data
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].length)):
        if place.start != end:
            raise UserError(f"file={where}: bytes of {name} start at {place.start}, expected {end}; the file is damaged")
        end += place.length
    check(end == size, "file", where, f"has {size} bytes, its header describes {end}; it is cut off or damaged")
    return places


class SafetensorsFolder:
    """A release's folder, opened: all headers read and checked against each other and against the index.

    Args:
        only: read these files and no others, without the index: a process that has a part of the work, of a folder that
            was checked as a whole before.

    Attributes:
        places: tensor name -> where it lies, file by file.

    Raises:
        UserError: no safetensors there, a missing shard, a name in two files, an index that disagrees with the files.
    """

    def __init__(self, folder: str | Path, only: Sequence[str] | None = None):
        self.folder = Path(folder)
        check(self.folder.is_dir(), "folder", folder, "does not exist; name a folder with *.safetensors files")
        files = sorted(p.name for p in self.folder.glob("*.safetensors")) if only is None else list(only)
        index_path = self.folder / INDEX
        named = None
        if only is None and index_path.is_file():
            try:
                named = json.loads(index_path.read_bytes())["weight_map"]
                listed = set(named.values())
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"file={index_path}: is no safetensors index") from None
            missing = sorted(listed - set(files))
            check(not missing, "folder", folder, f"{len(missing)} of {len(listed)} shards are missing, the first is {missing[:1]}; fetch them again")
            files = sorted(listed)
        check(bool(files), "folder", folder, "holds no *.safetensors files")
        self.places: dict[str, Place] = {}
        for file in files:
            for name, place in read_header(self.folder / file).items():
                if name in self.places:
                    raise UserError(f"folder={folder}: {name} stands in two files, {self.places[name].file} and {place.file}; remove the one that does not belong")
                self.places[name] = place
        if named is not None:
            wrong = [name for name in named if name not in self.places or self.places[name].file != named[name]]
            check(not wrong, "file", index_path, f"{len(wrong)} tensors are not where it says, the first is {wrong[:1]}")
        self._open: tuple[str, int] = ("", -1)

    @property
    def files(self) -> list[str]:
        return sorted({place.file for place in self.places.values()})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) along dim 0 of a tensor, on the CPU in its stored dtype. Only their bytes are read.

        Raises:
            UserError: the file ends early.
        """
        place = self.places[name]
        dtype = DTYPES[place.dtype]
        rows = place.shape[0] if place.shape else 1
        stop = rows if stop is None else stop
        shape = (stop - start, *place.shape[1:]) if place.shape else ()
        row_bytes = place.length // rows if rows else 0
        data = bytearray((stop - start) * row_bytes)
        if not data:
            return torch.empty(shape, dtype=dtype)
        if self._open[0] != place.file:
            if self._open[1] >= 0:
                os.close(self._open[1])
            self._open = (place.file, os.open(self.folder / place.file, os.O_RDONLY))
        view, offset = memoryview(data), place.start + start * row_bytes
        while view:
            count = os.preadv(self._open[1], [view], offset)
            check(count > 0, "file", self.folder / place.file, f"ends inside of {name}")
            view, offset = view[count:], offset + count
        return torch.frombuffer(data, dtype=dtype).view(shape)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The start of a safetensors file that holds these (name, dtype, shape) one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


class SafetensorsWriter:
    """One safetensors file, written front to back under a temporary name; `close` gives it its own.

    Args:
        tensors: (name, dtype, shape) in the order in which their bytes will come.
    """

    def __init__(self, path: Path, tensors: list[tuple[str, str, tuple[int, ...]]]):
        self.path, self._partial = path, path.with_name(path.name + ".partial")
        self._left = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in tensors)
        self._file = self._partial.open("wb")
        self._file.write(header_bytes(tensors))

    def write(self, values: torch.Tensor) -> None:
        """The next bytes: a tensor, or the next rows of one. CPU, in the dtype announced."""
        flat = values.detach().contiguous().view(-1).view(torch.uint8) if values.dim() else values.detach().view(1).view(torch.uint8)
        self._file.write(memoryview(flat.numpy()))
        self._left -= flat.numel()

    def close(self) -> None:
        """Durable under its own name when this returns. Raises ValueError when bytes are missing or too many."""
        if self._left:
            raise ValueError(f"{self.path.name}: {self._left} bytes of the announced tensors were not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)


def write_index(folder: Path, weight_map: Iterator[tuple[str, str]], total_bytes: int) -> None:
    """The index beside several shards, from (tensor, file) pairs; without it no loader sees them as one model, so it is written last."""
    partial = folder / (INDEX + ".partial")
    with partial.open("w") as f:
        f.write(f'{{"metadata": {{"total_size": {total_bytes}}}, "weight_map": {{')
        for i, (name, file) in enumerate(weight_map):
            f.write(f"{',' * (i > 0)}\n{json.dumps(name)}: {json.dumps(file)}")
        f.write("\n}}\n")
    os.replace(partial, folder / INDEX)


def shard_names(count: int) -> list[str]:
    """File names of a model in so many shards."""
    return ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:06d}.safetensors" for i in range(count)]
