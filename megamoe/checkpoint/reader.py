"""Read checkpoints: any part of any tensor, on any number of ranks, each reading only what it asks for.

    checkpoint = open_checkpoint("runs/a/checkpoints/step_00000200")     # or a run's folder of checkpoints, or s3://…
    checkpoint.names(), checkpoint.entry(name), checkpoint.state
    checkpoint.read("model/model.norm.weight")
    checkpoint.read("model/model.layers.1.block_sparse_moe.experts.w1", offset=(4, 0, 0), shape=(2, 128, 64))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.boxes import Box, intersect, slices
from megamoe.checkpoint.format import COMMIT, MANIFEST, Entry, Part, damaged, parse_header, parse_manifest, xxh3
from megamoe.checkpoint.objects import Objects, StoreError
from megamoe.utils.errors import UserError, check

# Reads that are under way at once: an object store answers slowly, but many at a time.
READERS = 8
OLD_FORM = "has the old format version 1, which only resumes with the megamoe that wrote it; use that, or another run.dir"


class Checkpoint:
    """One committed checkpoint. Made by `open_checkpoint`; reading needs no process group and no GPU.

    Attributes:
        location: where it lies, for messages.
        step: finished optimizer steps.
        state: JSON facts beside tensors, see docs/checkpoint.md.
        commit: the pointer's own facts (step, metrics).
    """

    def __init__(self, objects: Objects, folder: str):
        self.objects, self.folder = objects, folder
        self.location = f"{objects.location}/{folder}"
        try:
            self.commit = parse_header(_get(objects, f"{folder}/{COMMIT}", self.location), f"{self.location}/{COMMIT}")
            attempt, digest = str(self.commit.get("attempt")), self.commit.get("manifest_xxh3")
            if not attempt.isalnum():
                damaged(f"{self.location}/{COMMIT}", "names no attempt")
            self._base = f"{folder}/{attempt}"
            data = _get(objects, f"{self._base}/{MANIFEST}", self.location)
            if xxh3(data) != digest:
                damaged(f"{self.location}/{attempt}/{MANIFEST}", "does not match its recorded hash")
            self.manifest = parse_manifest(data, f"{self.location}/{attempt}/{MANIFEST}")
            found = objects.sizes(self._base)
        except StoreError as error:
            raise UserError(f"run.resume={self.location}: {error}") from None
        for name, (size, _) in self.manifest.files.items():
            here = found.get(f"{self._base}/{name}")
            if here is None:
                damaged(f"{self.location}/{attempt}/{name}", "is missing")
            if here != size:
                damaged(f"{self.location}/{attempt}/{name}", f"has {here} bytes, not the recorded {size}")

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest.state

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        return sorted(name for name in self.manifest.tensors if name.startswith(prefix))

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def entry(self, name: str) -> Entry:
        """dtype, global shape and parts of a tensor, without reading it.

        Raises:
            UserError: no such tensor.
        """
        check(name in self.manifest.tensors, "run.resume", self.location, f"has no tensor {name}; it is a checkpoint of another model or optimizer")
        return self.manifest.tensors[name]

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor, or a box of it, on the CPU in its stored dtype. Every stored part it touches is read whole and checked.

        Raises:
            UserError: no such tensor, a box outside of it, a missing file or bytes that do not match their hash.
        """
        entry = self.entry(name)
        offset = (0,) * len(entry.shape) if offset is None else tuple(offset)
        shape = tuple(s - o for s, o in zip(entry.shape, offset)) if shape is None else tuple(shape)
        return self.read_boxes([(name, (offset, shape))])[0]

    def _checked(self, name: str, box: Box) -> Entry:
        entry, (offset, shape) = self.entry(name), box
        check(len(offset) == len(shape) == len(entry.shape) and all(o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(offset, shape, entry.shape)),
              "run.resume", self.location, f"{name} has shape {entry.shape}, the part {shape} at {offset} was asked for; it is a checkpoint of another model")
        return entry

    def read_boxes(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Many boxes, some at a time; a stored part that several of them touch is read once. As `read` otherwise."""
        by_name: dict[str, list[int]] = {}
        for i, (name, _) in enumerate(wanted):
            by_name.setdefault(name, []).append(i)
        out: list[torch.Tensor] = [torch.empty(box[1], dtype=self._checked(name, box).torch_dtype) for name, box in wanted]

        def fill(name: str) -> None:
            entry = self.entry(name)
            for part in entry.parts:
                targets = [(i, common) for i in by_name[name] if (common := intersect(part.box, wanted[i][1])) is not None]
                if targets:
                    values = torch.frombuffer(self.part_bytes(name, part), dtype=entry.torch_dtype).view(part.box[1])
                for i, common in targets:
                    out[i][slices(common, wanted[i][1][0])] = values[slices(common, part.box[0])]

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(fill, by_name))
        return out

    def part_bytes(self, name: str, part: Part) -> bytearray:
        """The verified bytes of one stored part.

        Raises:
            UserError: missing file, short file, or other bytes than were written.
        """
        where = f"{self.location} ({self._base.rpartition('/')[2]}/{part.file})"
        try:
            data = self.objects.get_range(f"{self._base}/{part.file}", part.start, part.length)
        except FileNotFoundError:
            damaged(where, "is missing")
        except StoreError as error:
            raise UserError(f"run.resume={where}: {error}") from None
        if xxh3(data) != part.hash:
            damaged(where, f"does not match its recorded hash at {name}")
        return bytearray(data)

    def file_bytes(self, name: str) -> bytes:
        """One whole file as it lies there, unchecked. Raises FileNotFoundError or StoreError."""
        return self.objects.get(f"{self._base}/{name}")

    def verify_files(self) -> Iterator[tuple[str, int]]:
        """Hash every file; yields (name, bytes) after each.

        Raises:
            UserError: the first that is missing or not what was written.
        """
        for name, (size, digest) in sorted(self.manifest.files.items()):
            where = f"{self.location}/{self._base.rpartition('/')[2]}/{name}"
            try:
                if xxh3(self.objects.get(f"{self._base}/{name}")) != digest:
                    damaged(where, "does not match its recorded hash")
            except (FileNotFoundError, StoreError) as error:
                damaged(where, f"cannot be read ({error})")
            yield name, size


def open_checkpoint(location: str | Path) -> Checkpoint:
    """A committed checkpoint.

    Args:
        location: a checkpoint (`…/step_00000200`), or a place that holds some (a run's `checkpoints`): then the newest.

    Raises:
        UserError: there is none, or it is damaged, foreign, older or newer than this format.
    """
    text = str(location).rstrip("/")
    parent, _, name = text.rpartition("/")
    if name.startswith("step_"):
        return Checkpoint(Objects(parent or "."), name)
    steps = committed(Objects(text))
    check(bool(steps), "run.resume", text, "holds no committed checkpoint; name a folder such as RUN/checkpoints/step_00000200")
    return Checkpoint(Objects(text), steps[-1])


def committed(objects: Objects) -> list[str]:
    """Folders of committed checkpoints of a place, oldest first. What has no pointer does not exist."""
    if objects.root is not None:
        return [f for f in objects.folders() if f.startswith("step_") and (objects.root / f / COMMIT).is_file()]
    return [f for f in objects.folders() if f.startswith("step_") and f"{f}/{COMMIT}" in objects.sizes(f)]


def refuse_first_form(objects: Objects) -> None:
    """Raises UserError when a local place holds checkpoints of the first form, which nothing here reads."""
    old = sorted(objects.root.glob("step_*/state.json")) if objects.root is not None and objects.root.is_dir() else []
    check(not old, "run.resume", old[-1].parent if old else "", OLD_FORM)


def _get(objects: Objects, name: str, location: str) -> bytes:
    try:
        return objects.get(name)
    except FileNotFoundError:
        old = objects.root is not None and (objects.root / name).with_name("state.json").is_file()
        check(not old, "run.resume", location, OLD_FORM)
        if name.endswith(COMMIT):
            raise UserError(f"run.resume={location}: holds no {COMMIT}; name a folder such as RUN/checkpoints/step_00000200") from None
        damaged(f"{objects.location}/{name}", "is missing")
