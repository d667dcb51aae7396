"""Cut a checkpoint along a target layout, offline, so that each rank's part of a tensor is parts of its own.

Any layout can read any checkpoint, but a part is read and hashed whole: a rank that holds 1/8 of a matrix reads all of it
where it was written in one piece. Re-laid, what a rank reads is what it holds. Cells come from the plan that trains
(`parallel/plan.py`); optimizer state is cut like its parameter; all else (rng, hf/) keeps whole tensors.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megamoe.checkpoint.boxes import Box, intersect, pieces, shifted, slices
from megamoe.checkpoint.format import COMMIT, DTYPES, MODEL, Entry, step_folder
from megamoe.checkpoint.objects import Objects
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.checkpoint.writer import PART_BYTES, Writer, commit, new_attempt
from megamoe.model.config import ModelConfig
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.mesh import Axis, Mesh, rank_grids
from megamoe.parallel.plan import build_stage
from megamoe.utils.errors import check
from megamoe.utils.plain import to_plain
from megamoe.utils.workers import OnBytes, run_tasks, share

BUFFER_BYTES = 1 << 30  # of all writers together, see `Writer`


def smallest_world(parallel: ParallelConfig) -> int:
    """The fewest ranks on which a layout stands: dp as given, else as many as its experts need."""
    fold = parallel.cp * parallel.tp
    dp = parallel.dp or parallel.ep // math.gcd(parallel.ep, fold)
    return parallel.pp * dp * fold


def mesh_of(parallel: ParallelConfig, world: int, rank: int) -> Mesh:
    """Where a rank would stand, without process groups. Raises UserError for a world the layout does not fit."""
    axes = {}
    for name, rows in rank_grids(parallel, world).items():
        row = next(r for r in (tuple(r.tolist()) for r in rows) if rank in r)
        axes[name] = Axis(len(row), row.index(rank), row, None)
    return Mesh(**axes)


@dataclass(frozen=True)
class Cut:
    """How the target layout holds a parameter: pipeline rank, and the shape of one rank's cell of the whole."""

    stage: int
    cell: tuple[int, ...]


def target_cuts(config: ModelConfig, parallel: ParallelConfig, seq_len: int = 8192) -> dict[str, Cut]:
    """Logical parameter name -> cut. Builds each stage once on the meta device: cells of other ranks are its translates.

    Raises:
        UserError: a layout that this model does not take.
    """
    world = smallest_world(parallel)
    cuts: dict[str, Cut] = {}
    for stage in range(parallel.pp):
        rank = stage * (world // parallel.pp)
        for p in build_stage(config, parallel, mesh_of(parallel, world, rank), seq_len=seq_len).parameters():
            cuts.setdefault(p.megamoe.name, Cut(stage, tuple(p.shape)))
    return cuts


def cells(shape: tuple[int, ...], cell: tuple[int, ...]) -> list[Box]:
    """The grid of cells that tiles a tensor, row-major."""
    return [(tuple(o), cell) for o in itertools.product(*(range(0, n, max(c, 1)) for n, c in zip(shape, cell)))]


def bytes_touched(entry: Entry, boxes: list[Box]) -> int:
    """Bytes that a reader of each of these boxes gets from the store, all readers together."""
    if not entry.shape:
        return entry.num_bytes * len(boxes)
    parts = sorted(entry.parts, key=lambda p: p.box[0][0])
    starts = [p.box[0][0] for p in parts]
    tallest = max((p.box[1][0] for p in parts), default=0)
    total = 0
    for box in boxes:
        first = bisect.bisect_right(starts, box[0][0] - tallest)
        last = bisect.bisect_left(starts, box[0][0] + box[1][0])
        total += sum(p.length for p in parts[first:last] if intersect(p.box, box) is not None)
    return total


def parameter_of(name: str, cuts: dict[str, Cut]) -> str | None:
    """The parameter to which a tensor of a checkpoint belongs: model/P, optim/KIND/P."""
    inner = name.removeprefix(MODEL) if name.startswith(MODEL) else name.split("/", 2)[-1]
    return inner if inner in cuts else None


@dataclass(frozen=True)
class _Task:
    source: str
    place: str
    step: int
    attempt: str
    owners: tuple[tuple[int, tuple[tuple[str, Box], ...]], ...]
    part_bytes: int
    file_bytes: int


def _work(task: _Task, on_bytes: OnBytes):
    checkpoint, manifests = open_checkpoint(task.source), []
    for number, boxes in task.owners:
        writer = Writer(Objects(task.place), task.step, task.attempt, number, file_bytes=task.file_bytes)
        for name, box in boxes:
            entry = checkpoint.entry(name)
            itemsize = DTYPES[entry.dtype].itemsize
            # Read in slabs and cut those: a stored part is read whole, however small the piece that is wanted.
            for slab in pieces(box[1], PART_BYTES // itemsize):
                at, shape = shifted(slab, box[0])
                values = checkpoint.read(name, at, shape)
                for piece in pieces(shape, max(1, task.part_bytes // itemsize)):
                    cut = values[slices(piece, (0,) * len(shape))] if shape else values
                    writer.add(name, cut, shifted(piece, at)[0], entry.shape)
                on_bytes(values.numel() * itemsize)
        manifests.append(writer.close())
    return manifests


def owners_of(checkpoint: Checkpoint, cuts: dict[str, Cut]) -> dict[tuple[int, int, int], list[tuple[str, Box]]]:
    """(stage, cells of the tensor, number of the cell) -> boxes: ranks that hold equal parts share a set of files."""
    owners: dict[tuple[int, int, int], list[tuple[str, Box]]] = {}
    for name in checkpoint.names():
        shape = checkpoint.entry(name).shape
        parameter = parameter_of(name, cuts)
        cut = cuts[parameter] if parameter is not None else Cut(0, shape)
        check(len(cut.cell) == len(shape) and all(c and n % c == 0 for c, n in zip(cut.cell, shape)) or not shape or parameter is None,
              "checkpoint", checkpoint.location, f"{name} has shape {shape}, the layout wants cells of {cut.cell}; it is a checkpoint of another model")
        grid = cells(shape, cut.cell) if parameter is not None and shape else [((0,) * len(shape), shape)]
        for number, box in enumerate(grid):
            owners.setdefault((cut.stage, len(grid), number), []).append((name, box))
    return owners


def relay(source: str | Path, place: str | Path, config: ModelConfig, parallel: ParallelConfig, *, part_bytes: int = PART_BYTES, workers: int = 1, seq_len: int = 8192, on_total=None) -> dict[str, Any]:
    """Write checkpoint `source` anew at `place`, the same values cut for a layout.

    Args:
        part_bytes: largest part; ZeRO fragments of optimizer state cut cells further, small parts suit them.
        on_total: called with the bytes to come; returns the progress to tell.

    Returns: facts for people. `read_amplification_before`, `_after`: bytes that all distinct cells' readers get from the
        store over the bytes they hold.

    Raises:
        UserError: a layout that the model does not take, another model, or a place that has this step.
    """
    began = time.monotonic()
    checkpoint = open_checkpoint(source)
    cuts = target_cuts(config, parallel, seq_len)
    owners = owners_of(checkpoint, cuts)
    objects, attempt, step = Objects(place, create=True), new_attempt(), checkpoint.step
    check(f"{step_folder(step)}/{COMMIT}" not in objects.sizes(step_folder(step)), "--output", place, f"has a checkpoint of step {step}; name another place")
    numbered = [(i, tuple(boxes)) for i, (_, boxes) in enumerate(sorted(owners.items()))]
    sizes = [sum(math.prod(box[1]) * DTYPES[checkpoint.entry(name).dtype].itemsize for name, box in boxes) for _, boxes in numbered]
    ranges = share(sizes, workers)
    file_bytes = max(16 << 20, min(128 << 20, BUFFER_BYTES // (3 * len(ranges))))
    tasks = [_Task(str(source), str(place), step, attempt, tuple(numbered[a:b]), part_bytes, file_bytes) for a, b in ranges]
    try:
        results, peak = run_tasks(_work, tasks, on_total(sum(sizes)) if on_total else lambda n: None)
        state = {**checkpoint.state, "layout": to_plain(replace(parallel, dp=0))}
        manifest = commit(objects, step, attempt, [m for found in results for m in found], state, checkpoint.commit.get("metrics"))
    except BaseException:
        objects.delete_folder(f"{step_folder(step)}/{attempt}")
        raise
    seconds = time.monotonic() - began

    def amplification(tensors: dict[str, Entry]) -> float:
        wanted: dict[str, list[Box]] = {}
        for boxes in owners.values():
            for name, box in boxes:
                wanted.setdefault(name, []).append(box)
        return sum(bytes_touched(tensors[name], boxes) for name, boxes in wanted.items()) / max(sum(sizes), 1)

    return {
        "output": f"{objects.location}/{step_folder(step)}", "tensors": len(manifest.tensors), "parts": sum(len(e.parts) for e in manifest.tensors.values()), "files": len(manifest.files),
        "cells": len(numbered), "bytes": sum(sizes), "read_amplification_before": round(amplification(checkpoint.manifest.tensors), 3), "read_amplification_after": round(amplification(manifest.tensors), 3),
        "workers": len(tasks), "seconds": round(seconds, 2), "mb_per_s": round(sum(sizes) / seconds / 1e6, 1), "peak_memory_bytes_above_start": peak,
    }  # fmt: skip
