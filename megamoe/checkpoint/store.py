"""Checkpoints of one run on a local disk, first form: exact resume on the same layout, atomic, the newest K kept.

    RUN/checkpoints/step_00000200/
        model.safetensors       weights and buffers by name (rank 0)
        rank_00000.safetensors  this rank's optimizer and RNG state
        state.json              step, data position, layout, fingerprints, format version, xxh3 of every file

A save is written into a hidden folder and renamed once every rank has finished: a half-written one is never visible
and is swept by the next save. Nothing here is a pickle: tensors are safetensors, everything else JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from megamoe.parallel.mesh import Mesh
from megamoe.utils.errors import UserError, check

FORMAT_VERSION = 1
STATE = "state.json"
MODEL = "model.safetensors"


class SaveError(RuntimeError):
    """A save that did not happen; what was there before is untouched."""


class CheckpointStore:
    """The checkpoints of one run folder, seen from one rank. Methods that say so are collective over the world."""

    def __init__(self, run_dir: Path, keep_last: int, mesh: Mesh):
        self.dir = Path(run_dir) / "checkpoints"
        self.keep_last, self.mesh = keep_last, mesh

    @property
    def _rank_file(self) -> str:
        return f"rank_{self.mesh.world.rank:05d}.safetensors"

    def save(self, step: int, model: dict[str, torch.Tensor], rank_state: dict[str, torch.Tensor], meta: dict) -> Path:
        """Write one checkpoint and delete those past `keep_last`. Collective; blocks until it is on disk.

        Args:
            step: finished optimizer steps; names the checkpoint.
            model: weights and buffers, written by rank 0 only.
            rank_state: this rank's tensors, whatever it needs to go on exactly.
            meta: JSON-able facts to find again under `load`.

        Raises:
            SaveError: on every rank, when any rank could not write (disk full, permissions).
        """
        final = self.dir / f"step_{step:08d}"
        partial = self.dir / f".partial-{final.name}"
        first = self.mesh.world.rank == 0
        hashes: dict[str, str] = {}

        def prepare() -> None:
            if first:
                for stale in self.dir.glob(".partial-*"):
                    shutil.rmtree(stale)
                partial.mkdir(parents=True)

        def write() -> None:
            if first:
                hashes[MODEL] = _write(partial / MODEL, model)
            hashes[self._rank_file] = _write(partial / self._rank_file, rank_state)

        def commit() -> None:
            if first:
                state = {"format_version": FORMAT_VERSION, "step": step, "world_size": self.mesh.world.size, "layout": str(self.mesh), "files": merged, **meta}
                with open(partial / STATE, "w") as f:
                    json.dump(state, f, indent=1)
                    f.flush()
                    os.fsync(f.fileno())
                _fsync_folder(partial)
                if final.exists():
                    shutil.rmtree(final)
                os.rename(partial, final)
                _fsync_folder(self.dir)

        try:
            self._together(prepare)
            self._together(write)
            merged = {k: v for part in self._gather(hashes) for k, v in part.items()}
            self._together(commit)
        except SaveError:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if first:
            for old in self.complete()[: -self.keep_last]:
                if old != final:  # a run that went back in time: what it just wrote is not the oldest to it
                    shutil.rmtree(old, ignore_errors=True)
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.dir.glob("step_*") if (p / STATE).is_file())

    def latest(self) -> Path | None:
        return (self.complete() or [None])[-1]

    def load(self, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
        """Read (model, this rank's state, meta), every file checked against its hash.

        Raises:
            UserError: missing or foreign folder, newer format, other world size or layout, corrupt or missing file.
        """
        meta = read_state(path)
        check(meta["world_size"] == self.mesh.world.size and meta["layout"] == str(self.mesh), "run.resume", path,
              f"was saved on «{meta['layout']}», this run is «{self.mesh}»; resume on the same layout")
        files = meta["files"]
        for name in (MODEL, self._rank_file):
            check(name in files, "run.resume", path, f"{name} is not listed in {STATE}; the checkpoint is damaged, resume from another")
            _verify(path / name, files[name])
        return load_file(path / MODEL), load_file(path / self._rank_file), meta

    def _together(self, action: Callable[[], None]) -> None:
        """Run an action on every rank; raise on all of them when it failed on any."""
        problem = None
        try:
            action()
        except OSError as error:
            problem = f"{error.strerror or error}: {error.filename or self.dir}"
        except Exception as error:  # safetensors reports a full disk as its own error type
            problem = str(error)
        problems = [p for p in self._gather(problem) if p]
        if problems:
            raise SaveError(problems[0])

    def _gather(self, value):
        if self.mesh.control is None:
            return [value]
        out = [None] * self.mesh.world.size
        dist.all_gather_object(out, value, group=self.mesh.control)
        return out


def read_state(path: Path) -> dict:
    """The JSON of a checkpoint, its format version checked.

    Raises:
        UserError: not a checkpoint, unreadable, or written by a newer version.
    """
    path = Path(path)
    check((path / STATE).is_file(), "run.resume", path, f"holds no {STATE}: name a folder such as RUN/checkpoints/step_00000200")
    try:
        meta = json.loads((path / STATE).read_text())
        version = int(meta["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"run.resume={path}: {STATE} cannot be read ({error}); the checkpoint is damaged, resume from another") from None
    missing = sorted({"step", "world_size", "layout", "files", "identity", "progress", "config"} - meta.keys())
    check(not missing or version > FORMAT_VERSION, "run.resume", path, f"{STATE} lacks {', '.join(missing)}; the checkpoint is damaged, resume from another")
    check(version <= FORMAT_VERSION, "run.resume", path, f"has format version {version}, this program reads up to {FORMAT_VERSION}; update megamoe")
    return meta


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """Weights and buffers of a checkpoint folder, hash checked; what inference needs.

    Raises:
        UserError: as for `CheckpointStore.load`.
    """
    meta = read_state(path)
    _verify(Path(path) / MODEL, meta["files"].get(MODEL, ""))
    return load_file(Path(path) / MODEL)


def model_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stored model, from the header alone.

    Raises:
        UserError: no model file, or one whose header cannot be read.
    """
    file = Path(path) / MODEL
    check(file.is_file(), "run.resume", file, "is missing; the checkpoint is damaged, resume from another")
    try:
        with safe_open(file, framework="pt") as f:
            return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"run.resume={file}: cannot be read ({error}); the file is damaged, resume from another checkpoint") from None


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    # Clones: safetensors refuses tensors that share storage, and views of flat buffers do.
    save_file({k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}, path)
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
    return _hash(path)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _verify(path: Path, expected: str) -> None:
    check(path.is_file(), "run.resume", path, "is missing; the checkpoint is damaged, resume from another")
    check(_hash(path) == expected, "run.resume", path, "does not match its recorded hash; the file is damaged, resume from another checkpoint")


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
