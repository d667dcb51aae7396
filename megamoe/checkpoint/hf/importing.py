"""A release -> a checkpoint of ours: checked by headers first, then streamed by several processes, each a slice of it.

What the model computes with goes under model/: experts decoded to bf16 and stacked, A_log without its padding, the fp32
set in fp32, all else as it came. What it does not compute with goes under hf/: vision tensors, and the codes and scales of
MXFP4 experts, from which an export can give back unchanged experts byte for byte. `state["hf"]` remembers the rest.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.format import COMMIT, DTYPES, step_folder
from megamoe.checkpoint.hf.check import check_release
from megamoe.checkpoint.hf.config import differences, read_config, vision_shape
from megamoe.checkpoint.hf.experts import decode_stack
from megamoe.checkpoint.hf.files import SafetensorsFolder
from megamoe.checkpoint.hf.names import Names, Release, Row, release_of
from megamoe.utils.workers import OnBytes, run_tasks, share
from megamoe.checkpoint.objects import Objects
from megamoe.checkpoint.writer import Writer, commit, new_attempt
from megamoe.model.config import ModelConfig
from megamoe.utils.errors import UserError, check
from megamoe.utils.plain import to_plain

CHUNK_BYTES = 32 << 20  # of our tensors at once
# A writer holds the boxes of a file, their copies and the file itself; all writers together stay below this.
BUFFER_BYTES = 1 << 30


def read_release(folder: str | Path, base: ModelConfig, given: bool) -> tuple[SafetensorsFolder, Names, str]:
    """Open a release and find out what it is.

    Args:
        base: configuration for what config.json does not say.
        given: the user chose `base`: where config.json describes another model, refuse.

    Returns: the folder, its names as they should be, config.json's text ("" when there is none).

    Raises:
        UserError: no release there, or a config.json of another model.
    """
    source = SafetensorsFolder(folder)
    path = source.folder / "config.json"
    text, config, raw = "", base, {}
    if path.is_file():
        text = path.read_text()
        try:
            raw = json.loads(text)
            config = read_config(raw, base, str(path))
        except json.JSONDecodeError as error:
            raise UserError(f"file={path}: is not JSON ({error.msg} in line {error.lineno})") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"file={path}: {error}") from None
        other = differences(base, config) if given else []
        check(not other, f"model.{other[0][0]}" if other else "", other[0][1] if other else "", f"{path} says {other[0][2] if other else ''}; choose the model that it describes")
    check(bool(text) or given, "folder", folder, "has no config.json; say which model it is, such as model=k3_2p8t")
    if not given:
        config = replace(config, name=source.folder.resolve().name or "imported")
    form = release_of(config)
    found = source.places
    release = replace(
        form,
        prefix="language_model." if any(name.startswith("language_model.") for name in found) else "",
        mxfp4=any(name.endswith(".weight_packed") for name in found),
        vision=vision_shape(raw) if any(name.startswith(("vision_tower.", "mm_projector.")) for name in found) else None,
    )
    try:
        return source, Names(config, release), text
    except ValueError as error:
        raise UserError(f"folder={folder}: {error}") from None


@dataclass(frozen=True)
class Piece:
    """A slice [start, stop) along dim 0 of a group of rows; `stop` None is the whole, for what has no dims to cut."""

    group: int
    start: int
    stop: int
    num_bytes: int


def chunks(group: tuple[Row, ...], index: int) -> Iterator[Piece]:
    """A group cut along dim 0 so that a slice of each of its tensors has at most CHUNK_BYTES."""
    row = group[0]
    size = max(math.prod(r.shape) for r in group) * DTYPES[row.dtype].itemsize
    if row.form == "heads" or size <= CHUNK_BYTES:
        yield Piece(index, 0, row.shape[0], size * len(group))
        return
    per_row = size // row.shape[0]
    step = max(1, CHUNK_BYTES // per_row)
    for start in range(0, row.shape[0], step):
        stop = min(start + step, row.shape[0])
        yield Piece(index, start, stop, per_row * (stop - start) * len(group))


def read_rows(source: SafetensorsFolder, group: tuple[Row, ...], piece: Piece, carry: bool) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """(name of ours, values of the slice, shape of the whole) of one piece.

    Raises:
        UserError: A_log has something else than zeros behind its heads.
    """
    for row in group:
        if row.form == "heads":
            values = source.read(row.released).flatten()
            heads, padding = values[: row.shape[0]], values[row.shape[0] :]
            check(not padding.any(), "tensor", row.released, f"has {len(values)} entries for {len(heads)} heads, and those behind are not zero; it belongs to another model")
            yield row.key, heads.float(), row.shape
        elif row.form == "experts" and row.mxfp4:
            names = [[s.name for s in row.stored(e)] for e in range(piece.start, piece.stop)]
            packed, scale = (torch.stack([source.read(pair[i]) for pair in names]) for i in (0, 1))
            if carry:
                for name, values in zip(row.carried, (packed, scale)):
                    yield name, values, (row.shape[0], *values.shape[1:])
            yield row.key, decode_stack(packed, scale), row.shape
        elif row.form == "experts":
            yield row.key, torch.stack([source.read(row.stored(e)[0].name) for e in range(piece.start, piece.stop)]), row.shape
        else:
            values = source.read(row.released, piece.start, piece.stop)
            yield row.key, values.float() if row.dtype == "F32" and row.form != "passed" else values, row.shape


@dataclass(frozen=True)
class _Task:
    folder: str
    files: tuple[str, ...]
    names: Names
    pieces: tuple[Piece, ...]
    place: str
    step: int
    attempt: str
    writer: int
    file_bytes: int
    carry: bool


def files_of(source: SafetensorsFolder, groups: list[tuple[Row, ...]], pieces: tuple[Piece, ...]) -> tuple[str, ...]:
    """The files that hold what these pieces read, so that a process need not know of the others."""
    files = set()
    for piece in pieces:
        for row in groups[piece.group]:
            for expert in range(piece.start, piece.stop) if row.form == "experts" else (0,):
                files.update(source.places[stored.name].file for stored in row.stored(expert))
    return tuple(sorted(files))


def _work(task: _Task, on_bytes: OnBytes):
    source, groups = SafetensorsFolder(task.folder, task.files), list(task.names.groups())
    writer = Writer(Objects(task.place), task.step, task.attempt, task.writer, file_bytes=task.file_bytes)
    for piece in task.pieces:
        for name, values, shape in read_rows(source, groups[piece.group], piece, task.carry):
            writer.add(name, values, (piece.start, *[0] * (len(shape) - 1)), shape)
        on_bytes(piece.num_bytes)
    return writer.close(), writer.bytes_written


def import_release(folder: str | Path, place: str | Path, base: ModelConfig, *, given: bool = False, step: int = 0, workers: int = 1, carry: bool = True, on_total=None) -> dict[str, Any]:
    """Convert a release's folder into checkpoint `place`/step_…; nothing exists there before all of it is written.

    Args:
        base, given: see `read_release`.
        carry: keep the codes and scales of MXFP4 experts too.
        on_total: called with the bytes to come once all headers are checked; returns the progress to tell.

    Returns: facts for people: location, tensors, bytes, seconds, peak memory.

    Raises:
        UserError: anything about the release that does not fit, before any data is read where headers show it; or the
            step is taken. StoreError: the place could not be written.
    """
    began = time.monotonic()
    source, names, text = read_release(folder, base, given)
    deviations = check_release(names, source.places, str(folder))
    objects, attempt = Objects(place, create=True), new_attempt()
    check(f"{step_folder(step)}/{COMMIT}" not in objects.sizes(step_folder(step)), "--step", step, f"{objects.location} has a checkpoint of this step; choose another place or step")
    groups = list(names.groups())
    todo = [piece for index, group in enumerate(groups) for piece in chunks(group, index)]
    source_bytes = sum(p.length for p in source.places.values())
    ranges = share([piece.num_bytes for piece in todo], workers)
    file_bytes = max(16 << 20, min(128 << 20, BUFFER_BYTES // (3 * len(ranges))))
    tasks = [_Task(str(folder), files_of(source, groups, tuple(todo[a:b])), names, tuple(todo[a:b]), str(place), step, attempt, i, file_bytes, carry) for i, (a, b) in enumerate(ranges)]
    num_released = len(source.places)
    source.places.clear()  # the workers read their own headers
    on_bytes = on_total(sum(p.num_bytes for p in todo)) if on_total else lambda n: None
    try:
        results, peak = run_tasks(_work, tasks, on_bytes)
        state = {
            "config": {"model": to_plain(names.config)},
            "hf": {"release": asdict(names.release), "stored": deviations, "config": text},
        }
        manifest = commit(objects, step, attempt, [m for m, _ in results], state)
    except BaseException:
        objects.delete_folder(f"{step_folder(step)}/{attempt}")
        raise
    seconds = time.monotonic() - began
    written = sum(n for _, n in results)
    return {
        "output": f"{objects.location}/{step_folder(step)}", "release": names.release.name, "released_tensors": num_released, "tensors": len(manifest.tensors),
        "source_bytes": source_bytes, "written_bytes": written, "workers": len(tasks), "seconds": round(seconds, 2),
        "source_mb_per_s": round(source_bytes / seconds / 1e6, 1), "written_mb_per_s": round(written / seconds / 1e6, 1), "peak_memory_bytes_above_start": peak,
    }  # fmt: skip


def release_from_state(values: dict[str, Any]) -> Release:
    """The `Release` in a checkpoint's state. Raises UserError when it is none."""
    from megamoe.checkpoint.hf.names import VisionShape

    try:
        vision = values.get("vision")
        if vision is not None:
            vision = VisionShape(**{**vision, "merge_kernel_size": tuple(vision["merge_kernel_size"])})
        return Release(**{**values, "vision": vision})
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"state.hf.release={str(values)[:80]}: was written by another version of megamoe; convert the release again") from None
