"""Is a checkpoint whole? Hashes, completeness, finite values, and the names that its model must have. Every fault is
listed, not only the first; one pass over the bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.format import DTYPES, MODEL, OPTIM, Entry, xxh3
from megamoe.checkpoint.hf.check import NamesDiffer, check_release, report
from megamoe.checkpoint.hf.exporting import saved_model
from megamoe.checkpoint.hf.importing import read_release
from megamoe.checkpoint.hf.names import Names, release_of
from megamoe.checkpoint.objects import StoreError
from megamoe.checkpoint.offline.opened import Opened
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.model.config import ModelConfig
from megamoe.utils.workers import OnBytes, run_tasks, share

# Faults of one kind that are listed; a damaged disk can break every tensor.
LISTED = 100
# State that has no row in the table: the MTP layer, which releases leave out.
UNLISTED = MODEL + "model.mtp."


def not_finite(name: str, values: torch.Tensor) -> str | None:
    """A sentence when values are NaN or infinite. In MXFP4 scales 255 is NaN, 253 and 254 may exceed bf16."""
    if values.dtype.is_floating_point:
        bad = int((~torch.isfinite(values.float() if values.dtype.itemsize < 2 else values)).sum())
        return f"{name}: {bad} of {values.numel()} values are NaN or infinite" if bad else None
    if name.endswith("weight_scale"):
        bad = int((values > 252).sum())
        return f"{name}: {bad} scales above 2^125, NaN or infinite in bf16" if bad else None
    return None


@dataclass(frozen=True)
class _Files:
    location: str
    names: tuple[str, ...]


def _check_files(task: _Files, on_bytes: OnBytes) -> list[str]:
    """Files of ours: whole-file hash, then every part's hash and values out of the same bytes."""
    checkpoint, faults = open_checkpoint(task.location), []
    inside: dict[str, list[tuple[str, Entry, Any]]] = {}
    for name, entry in checkpoint.manifest.tensors.items():
        for part in entry.parts:
            inside.setdefault(part.file, []).append((name, entry, part))
    for file in task.names:
        _, digest = checkpoint.manifest.files[file]
        try:
            data = checkpoint.file_bytes(file)
        except (FileNotFoundError, StoreError) as error:
            faults.append(f"{file}: cannot be read ({error})")
            continue
        whole = xxh3(data) == digest
        if not whole:
            faults.append(f"{file}: does not match its recorded hash")
        view = memoryview(data)
        for name, entry, part in inside.get(file, []):
            content = view[part.start : part.start + part.length]
            if not whole and xxh3(content) != part.hash:
                faults.append(f"{name} at {part.box[0]}: does not match its recorded hash")
            elif part.length:
                faults += filter(None, [not_finite(name, torch.frombuffer(bytearray(content), dtype=entry.torch_dtype))])
        on_bytes(len(data))
    return faults


def _check_tensors(task: _Files, on_bytes: OnBytes) -> list[str]:
    """Tensors of a release: values, and A_log's padding is part of the import's checks."""
    opened, faults = Opened(task.location), []
    for name in task.names:
        for rows in opened.rows(name):
            faults += filter(None, [not_finite(name, rows)])
            on_bytes(rows.numel() * rows.element_size())
    return faults


def check_names(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Faults in the name set of one of ours: model tensors against the table, optimizer state against the model's."""
    names = Names(config, release_of(config))
    expected = {row.key: row for row in names.rows if row.form != "passed"}
    here = [n for n in checkpoint.names(MODEL) if not n.startswith(UNLISTED)]
    faults = report(expected.keys() - set(here), set(here) - expected.keys())
    for name in here:
        if name in expected and checkpoint.entry(name).shape != expected[name].shape:
            faults.append(f"shape: {name} has {list(checkpoint.entry(name).shape)}, expected {list(expected[name].shape)}")
    by_kind: dict[str, set[str]] = {}
    for name in checkpoint.names(OPTIM):
        _, kind, parameter = name.split("/", 2)
        by_kind.setdefault(kind, set()).add(parameter)
        if MODEL + parameter not in checkpoint:
            faults.append(f"unknown: {name} (no tensor {MODEL}{parameter})")
        elif checkpoint.entry(name).shape != checkpoint.entry(MODEL + parameter).shape:
            faults.append(f"shape: {name} has {list(checkpoint.entry(name).shape)}, its parameter {list(checkpoint.entry(MODEL + parameter).shape)}")
    # The two moments of AdamW come together.
    faults += report({f"optim/exp_avg_sq/{p}" for p in by_kind.get("exp_avg", set()) - by_kind.get("exp_avg_sq", set())}, ())
    faults += report({f"optim/exp_avg/{p}" for p in by_kind.get("exp_avg_sq", set()) - by_kind.get("exp_avg", set())}, ())
    return faults


def verify(location: str | Path, *, config: ModelConfig | None = None, base: ModelConfig | None = None, workers: int = 1, on_total=None) -> dict[str, Any]:
    """Check all of a checkpoint or of a release's folder.

    Args:
        config: the model it must be of; None takes what it says about itself.
        base: for what a release's config.json does not say.
        on_total: called with the bytes to come; returns the progress to tell.

    Returns: facts for people; `faults` is a list of sentences, empty when all is well.

    Raises:
        UserError: nothing there, or damaged so far that its contents are unknown (manifest, headers, missing files).
    """
    began = time.monotonic()
    opened = Opened(location)
    faults: list[str] = []
    model = config
    if opened.checkpoint is not None:
        checkpoint = opened.checkpoint
        model = config or saved_model(checkpoint)
        if model is not None:
            faults += check_names(checkpoint, model)
        files = sorted(checkpoint.manifest.files)
        sizes, function = [checkpoint.manifest.files[f][0] for f in files], _check_files
    else:
        files = list(opened.specs)
        sizes, function = [opened.num_bytes(n) for n in files], _check_tensors
        if config is not None or (opened.folder.folder / "config.json").is_file():
            _, names, _ = read_release(location, config or base or ModelConfig(), given=config is not None)
            model = names.config
            try:
                check_release(names, opened.folder.places, str(location))
            except NamesDiffer as error:
                faults += error.lines
            for row in names.rows:
                if row.form == "heads" and row.released in opened.specs and opened.folder.read(row.released).flatten()[row.shape[0] :].any():
                    faults.append(f"{row.released}: entries behind the {row.shape[0]} heads are not zero")
    results, peak = run_tasks(function, [_Files(str(location), tuple(files[a:b])) for a, b in share(sizes, workers)], on_total(sum(sizes)) if on_total else lambda n: None)
    faults += [fault for found in results for fault in found]
    seconds = time.monotonic() - began
    floats = sum(DTYPES[dtype].is_floating_point for dtype, _ in opened.specs.values())
    return {
        "checkpoint": opened.checkpoint.location if opened.checkpoint else str(location), "kind": opened.kind, "tensors": len(opened.specs), "floating_tensors": floats, "files_or_tensors_read": len(files), "bytes": sum(sizes),
        "model": model.name if model is not None else None, "faults": faults[:LISTED], "num_faults": len(faults),
        "seconds": round(seconds, 2), "mb_per_s": round(sum(sizes) / max(seconds, 1e-9) / 1e6, 1), "peak_memory_bytes_above_start": peak, "workers": min(workers, max(len(files), 1)),
    }  # fmt: skip
