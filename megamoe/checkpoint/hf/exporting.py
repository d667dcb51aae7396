"""A checkpoint of ours -> a release's folder: every byte planned from the configuration, then streamed file by file.

Unchanged tensors leave as they came: bf16 and fp32 rows bit for bit, A_log with its padding, MXFP4 experts through the
codes and scales that the import kept (in this checkpoint, or in the one given as `base`), vision tensors untouched.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.format import DTYPE_NAMES, DTYPES, MODEL
from megamoe.checkpoint.hf.check import NamesDiffer, report
from megamoe.checkpoint.hf.config import differences, read_config, without_quantization, write_config
from megamoe.checkpoint.hf.experts import encode_stack
from megamoe.checkpoint.hf.files import SafetensorsWriter, shard_names, write_index
from megamoe.checkpoint.hf.importing import CHUNK_BYTES, Piece, chunks, release_from_state
from megamoe.checkpoint.hf.names import HF, Names, Row, release_of
from megamoe.utils.workers import OnBytes, run_tasks, share
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.model.config import ModelConfig
from megamoe.utils.errors import UserError, check
from megamoe.utils.plain import from_plain


def saved_model(checkpoint: Checkpoint) -> ModelConfig | None:
    """The model configuration that a checkpoint was saved with; None when it says nothing."""
    values = (checkpoint.state.get("config") or {}).get("model")
    return None if values is None else from_plain(ModelConfig, values, "model.")


@dataclass(frozen=True)
class Sources:
    """Where tensors come from: the checkpoint, then, for hf/ only, the base."""

    checkpoint: Checkpoint
    base: Checkpoint | None

    def holder(self, name: str) -> Checkpoint | None:
        if name in self.checkpoint:
            return self.checkpoint
        return self.base if name.startswith(HF) and self.base is not None and name in self.base else None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        holder = self.holder(name)
        shape = holder.entry(name).shape
        return holder.read(name, (start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))


@dataclass(frozen=True)
class Unit:
    """What stands together in a file: a whole row, or some experts with all their matrices.

    Its tensors are not kept, `Plan.tensors` tells them anew: half a million names would be most of a process's memory.
    """

    piece: Piece
    num_bytes: int
    num_tensors: int
    alignment: int


@dataclass(frozen=True)
class Plan:
    """How every tensor is written.

    Attributes:
        names: of the release.
        stored: deviations from the table that the import noted, {released name: [dtype, shape]}.
        own_dtypes: {name in our checkpoint: dtype} of rows that keep the checkpoint's dtype.
    """

    names: Names
    stored: dict[str, list]
    own_dtypes: dict[str, str]

    def tensors(self, group: tuple[Row, ...], piece: Piece) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of what a piece of a group becomes, in file order."""
        for expert in range(piece.start, piece.stop) if group[0].form == "experts" else (0,):
            for row in group:
                for tensor in row.stored(expert):
                    dtype, shape = tensor.dtype, tensor.shape
                    if row.released in self.stored:
                        dtype, shape = self.stored[row.released][0], tuple(self.stored[row.released][1])
                    yield tensor.name, dtype if dtype == "U8" else self.own_dtypes.get(row.key, dtype), shape

    def unit(self, group: tuple[Row, ...], piece: Piece) -> Unit:
        widths = [(DTYPES[dtype].itemsize, math.prod(shape)) for _, dtype, shape in self.tensors(group, piece)]
        return Unit(piece, sum(w * n for w, n in widths), len(widths), max(w for w, _ in widths))


def plan_units(names: Names, sources: Sources, stored: dict[str, list], keep_dtype: bool) -> tuple[Plan, list[Unit]]:
    """Every tensor of the release, in units, in the release's order.

    Args:
        stored: see `Plan`.
        keep_dtype: text tensors in the checkpoint's own dtype, not the release's.

    Raises:
        NamesDiffer: tensors that the checkpoint lacks or has in another shape.
    """
    missing, wrong, own_dtypes = [], [], {}
    for row in names.rows:
        holder = sources.holder(row.key)
        if holder is None:
            missing.append(row.key)
            continue
        entry = holder.entry(row.key)
        if entry.shape != row.shape:
            wrong.append(f"shape: {row.key} has {list(entry.shape)}, expected {list(row.shape)}")
        if keep_dtype or row.form == "passed":
            own_dtypes[row.key] = entry.dtype
    if missing or wrong:
        known = {row.key for row in names.rows}
        others = [n for n in sources.checkpoint.names() if n not in known and n.startswith((MODEL, HF)) and not n.endswith(("_packed", "_scale"))]
        first = missing[0] if missing else wrong[0].split(": ")[1]
        raise NamesDiffer(f"checkpoint={sources.checkpoint.location}: {len(missing)} tensors missing and {len(wrong)} of another shape, the first is {first}; is it a checkpoint of this model? vision and hf/ tensors come from --base", report(missing, others) + wrong)
    plan = Plan(names, stored, own_dtypes)
    units = []
    for index, group in enumerate(names.groups()):
        whole = Piece(index, 0, group[0].shape[0], 0)
        units += [plan.unit(group, piece) for piece in (chunks(group, index) if group[0].form == "experts" else (whole,))]
    return plan, units


def plan_files(units: list[Unit], shard_bytes: int) -> list[list[Unit]]:
    """Units in order, filled up to `shard_bytes`. Within a file wider dtypes come first, so that every tensor is aligned."""
    files: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if files[-1] and size + unit.num_bytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(unit)
        size += unit.num_bytes
    return [sorted(file, key=lambda u: -u.alignment) for file in files]


def write_unit(sources: Sources, plan: Plan, group: tuple[Row, ...], unit: Unit, write, on_bytes: OnBytes) -> int:
    """Hand a unit's tensors to `write`, in the order announced. Returns the groups of 32 that were encoded anew."""
    piece, encoded = unit.piece, 0
    row = group[0]
    _, dtype, shape = next(plan.tensors(group, piece))
    if row.form != "experts":
        if row.form == "heads":
            values = sources.read(row.key, 0, row.shape[0]).to(DTYPES[dtype])
            padded = torch.zeros(math.prod(shape), dtype=values.dtype)
            padded[: len(values)] = values
            write(padded.view(shape))
            return 0
        for part in chunks(group, piece.group):
            values = sources.read(row.key, part.start, part.stop).to(DTYPES[dtype])
            write(values)
            on_bytes(values.numel() * values.element_size())
        return 0
    stacks: list[tuple[torch.Tensor, ...]] = []
    for r in group:
        values = sources.read(r.key, piece.start, piece.stop)
        if not r.mxfp4:
            stacks.append((values.to(DTYPES[dtype]),))
            continue
        has_own = all(sources.holder(name) is not None for name in r.carried)
        own = tuple(sources.read(name, piece.start, piece.stop) for name in r.carried) if has_own else None
        packed, scale, anew = encode_stack(values, own)
        stacks.append((packed, scale))
        encoded += anew
    for local in range(piece.stop - piece.start):
        for stack in stacks:
            for tensor in stack:
                write(tensor[local])
    on_bytes(unit.num_bytes)
    return encoded


@dataclass(frozen=True)
class _Task:
    checkpoint: str
    base: str | None
    plan: Plan
    files: tuple[tuple[str, tuple[Unit, ...]], ...]
    output: str


def _work(task: _Task, on_bytes: OnBytes) -> int:
    sources = Sources(open_checkpoint(task.checkpoint), None if task.base is None else open_checkpoint(task.base))
    groups, encoded = list(task.plan.names.groups()), 0
    for name, units in task.files:
        writer = SafetensorsWriter(Path(task.output) / name, [t for unit in units for t in task.plan.tensors(groups[unit.piece.group], unit.piece)])
        for unit in units:
            encoded += write_unit(sources, task.plan, groups[unit.piece.group], unit, writer.write, on_bytes)
        writer.close()
    return encoded


def export_names(sources: Sources, config: ModelConfig, *, experts: str) -> tuple[Names, dict[str, list], str]:
    """What the release will be: names, deviations, and the config.json that the import kept ("" if none).

    Args:
        experts: "mxfp4", "bf16", or "auto" for what the source had, or else the family's form.
    """
    kept = sources.checkpoint.state.get("hf") or (sources.base.state.get("hf") if sources.base is not None else None)
    if kept:
        release, stored, text = release_from_state(kept["release"]), kept.get("stored", {}), kept.get("config", "")
    else:
        release, stored, text = release_of(config), {}, ""
        # A model trained here has no vision tower, and nothing to invent one from.
        release = replace(release, vision=None)
    if experts != "auto":
        release = replace(release, mxfp4=experts == "mxfp4")
    try:
        return Names(config, release), stored, text
    except ValueError as error:
        raise UserError(f"--experts={experts}: {error}") from None


def export_release(checkpoint: str | Path, output: str | Path, *, base: str | Path | None = None, config: ModelConfig | None = None, experts: str = "auto", keep_dtype: bool = False, shard_bytes: int = 16 << 30, workers: int = 1, on_total=None) -> dict[str, Any]:
    """Write a release's folder from a checkpoint.

    Args:
        base: an imported checkpoint that has what training does not keep: codes of unchanged experts, vision, config.json.
        config: of the model, where the checkpoint does not say.
        experts: see `export_names`.
        keep_dtype: the checkpoint's dtypes for text tensors instead of the release's bf16 and fp32.
        on_total: as in `import_release`.

    Returns: facts for people. `left_out`: tensors of ours that releases do not have (MTP).

    Raises:
        UserError: an output that is not empty, or a checkpoint that is not of this model: before anything is written.
    """
    began = time.monotonic()
    sources = Sources(open_checkpoint(checkpoint), None if base is None else open_checkpoint(base))
    model = saved_model(sources.checkpoint) or config
    check(model is not None, "checkpoint", checkpoint, "does not say which model it is; name it, such as model=k3_2p8t")
    if config is not None:
        other = differences(config, model)
        check(not other, f"model.{other[0][0]}" if other else "", other[0][1] if other else "", f"{checkpoint} was saved with {other[0][2] if other else ''}; choose the model that it holds")
    folder = Path(output)
    check(not folder.exists() or (folder.is_dir() and not any(folder.iterdir())), "--output", output, "is not empty; name a new folder")
    names, stored, text = export_names(sources, model, experts=experts)
    plan, units = plan_units(names, sources, stored, keep_dtype)
    files = plan_files(units, shard_bytes)
    total = sum(unit.num_bytes for unit in units)
    named = list(zip(shard_names(len(files)), files))
    folder.mkdir(parents=True, exist_ok=True)
    ranges = share([sum(u.num_bytes for u in file) for file in files], workers)
    tasks = [_Task(str(checkpoint), None if base is None else str(base), plan, tuple((n, tuple(f)) for n, f in named[a:b]), str(folder)) for a, b in ranges]
    results, peak = run_tasks(_work, tasks, on_total(total) if on_total else lambda n: None)
    (folder / "config.json").write_text(_config_text(model, names, text))
    if len(files) > 1:
        groups = list(names.groups())
        write_index(folder, ((name, file) for file, units in named for unit in units for name, _, _ in plan.tensors(groups[unit.piece.group], unit.piece)), total)
    known = {row.key for row in names.rows}
    seconds = time.monotonic() - began
    return {
        "output": str(folder), "release": names.release.name, "files": len(files), "tensors": sum(u.num_tensors for u in units), "bytes": total,
        "groups_encoded_anew": sum(results), "left_out": [n for n in sources.checkpoint.names(MODEL) if n not in known],
        "workers": len(tasks), "seconds": round(seconds, 2), "mb_per_s": round(total / seconds / 1e6, 1), "peak_memory_bytes_above_start": peak,
    }  # fmt: skip


def _config_text(model: ModelConfig, names: Names, kept: str) -> str:
    """The source's own config.json, to the byte, while it still describes what is exported."""
    if kept:
        raw = json.loads(kept)
        if not differences(model, read_config(raw, model, "config.json")):
            return kept if names.release.mxfp4 else json.dumps(without_quantization(raw), indent=2) + "\n" if "quantization_config" in kept else kept
    return json.dumps(write_config(model, names.release), indent=2) + "\n"
