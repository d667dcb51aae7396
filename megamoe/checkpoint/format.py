"""The on-disk format of checkpoints: names, the manifest as objects, and its checks. See docs/checkpoint.md.

    PLACE/step_00000200/commit.json                    written last and only once: a checkpoint exists when this does
    PLACE/step_00000200/ATTEMPT/manifest.json          what there is, where, and its hashes
    PLACE/step_00000200/ATTEMPT/00003-0001.safetensors parts written by one rank

Nothing here is a pickle, and nothing says how many ranks there were: tensors have logical names and lie in boxes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import xxhash

from megamoe.checkpoint.boxes import Box, uncovered
from megamoe.utils.errors import UserError

FORMAT = "megamoe-checkpoint"
FORMAT_VERSION = 2
COMMIT = "commit.json"
MANIFEST = "manifest.json"

# Namespaces of tensor names. MODEL has weights and buffers in their compute dtype; OPTIM has state under the parameter's name.
MODEL = "model/"
OPTIM = "optim/"
RNG = "rng/"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def step_folder(step: int) -> str:
    return f"step_{step:08d}"


def xxh3(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Part:
    """One box of a tensor in a file: `length` bytes from byte `start`, row-major, with their xxh3."""

    file: str
    box: Box
    start: int
    length: int
    hash: str


@dataclass
class Entry:
    """One tensor: safetensors dtype name, global shape, and the parts that fill it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass
class Manifest:
    """Attributes:
    state: JSON facts beside tensors (progress, identity, config, revision, …); readers take what they know.
    files: name -> (bytes, xxh3), relative to the attempt's folder.
    tensors: logical name -> entry.
    """

    step: int
    state: dict[str, Any]
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)

    def merge(self, other: Manifest) -> None:
        """Take over another writer's parts.

        Raises:
            ValueError: the two disagree on a tensor's dtype or shape.
        """
        self.files |= other.files
        for name, theirs in other.tensors.items():
            mine = self.tensors.setdefault(name, Entry(theirs.dtype, theirs.shape))
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                raise ValueError(f"{name}: {mine.dtype} {mine.shape} of one writer, {theirs.dtype} {theirs.shape} of another")
            mine.parts += theirs.parts

    def check_complete(self) -> None:
        """Raises ValueError, naming the tensor, unless every tensor is filled exactly once by parts that lie inside their files."""
        for name, entry in self.tensors.items():
            problem = uncovered(entry.shape, [part.box for part in entry.parts])
            for part in entry.parts:
                if math.prod(part.box[1]) * entry.torch_dtype.itemsize != part.length or part.start < 0:
                    problem = f"the part at {part.box[0]} has {part.length} bytes"
                elif part.file not in self.files or part.start + part.length > self.files[part.file][0]:
                    problem = f"the part at {part.box[0]} lies outside of its file"
            if problem:
                raise ValueError(f"{name}: {problem}")

    def to_json(self) -> bytes:
        names = sorted(self.files)
        index = {name: i for i, name in enumerate(names)}
        tensors = {
            name: {"dtype": e.dtype, "shape": e.shape, "parts": [[index[p.file], *p.box, p.start, p.length, p.hash] for p in e.parts]}
            for name, e in sorted(self.tensors.items())
        }
        files = [[name, *self.files[name]] for name in names]
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, "step": self.step, "state": self.state, "files": files, "tensors": tensors}).encode()


def parse_manifest(data: bytes, where: str, *, complete: bool = True) -> Manifest:
    """The manifest of one committed checkpoint, everything in it checked but the tensor bytes.

    File names must be plain names: a manifest cannot point outside of its folder. `complete` asks that every tensor is
    filled; one writer's piece is not.

    Raises:
        UserError: not JSON, another format or version, or anything that is not what this format says.
    """
    raw = parse_header(data, where)
    try:
        files = {}
        names = []
        for name, size, digest in raw["files"]:
            if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\\" in name:
                raise ValueError(f"file name {name!r}")
            files[name] = (_int(size), str(digest))
            names.append(name)
        tensors = {}
        for name, e in raw["tensors"].items():
            if e["dtype"] not in DTYPES:
                raise ValueError(f"{name}: dtype {e['dtype']!r}")
            parts = [Part(names[_int(f)], (_ints(o), _ints(s)), _int(start), _int(length), str(digest)) for f, o, s, start, length, digest in e["parts"]]
            tensors[name] = Entry(e["dtype"], _ints(e["shape"]), parts)
        if not isinstance(raw["state"], dict):
            raise ValueError("state is no object")
        manifest = Manifest(_int(raw["step"]), raw["state"], files, tensors)
        if complete:
            manifest.check_complete()
        return manifest
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        damaged(where, f"is no valid manifest ({reason[:200]})")


def parse_header(data: bytes, where: str) -> dict[str, Any]:
    """JSON of this format and version.

    Raises:
        UserError: anything else: a pickle, a torn file, an older or newer version.
    """
    if data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"):
        damaged(where, "is a pickle, not JSON; pickles are never opened")
    try:
        raw = json.loads(data)
        version = raw["format_version"]
        if raw["format"] != FORMAT or type(version) is not int:
            raise ValueError(f"format {raw['format']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        damaged(where, f"cannot be read ({str(error)[:100]})")
    if version > FORMAT_VERSION:
        raise UserError(f"run.resume={where}: has format version {version}, this program reads version {FORMAT_VERSION}; update megamoe")
    if version < FORMAT_VERSION:
        raise UserError(f"run.resume={where}: has the old format version {version}, this program reads version {FORMAT_VERSION}; use the megamoe that wrote it")
    return raw


def damaged(where: str, what: str) -> NoReturn:
    raise UserError(f"run.resume={where}: {what}; the checkpoint is damaged, resume from another")


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_int(v) for v in values)
