"""Split or merge the files of a release's folder by size. Order and bytes of tensors stay; other small files come along."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format import DTYPES
from megamoe.checkpoint.hf.files import INDEX, SafetensorsFolder, SafetensorsWriter, shard_names, write_index
from megamoe.checkpoint.offline.opened import Opened
from megamoe.utils.errors import check
from megamoe.utils.workers import OnBytes, run_tasks, share


@dataclass(frozen=True)
class _Task:
    source: str
    output: str
    files: tuple[tuple[str, tuple[str, ...]], ...]


def _work(task: _Task, on_bytes: OnBytes) -> None:
    opened = Opened(task.source)
    for file, names in task.files:
        writer = SafetensorsWriter(Path(task.output) / file, [(name, *opened.specs[name]) for name in names])
        for name in names:
            for rows in opened.rows(name):
                writer.write(rows)
                on_bytes(rows.numel() * rows.element_size())
        writer.close()


def in_file_order(source: SafetensorsFolder) -> list[str]:
    """Names as their bytes lie, file by file: what stood together (an expert's tensors) stays together."""
    return sorted(source.places, key=lambda name: (source.places[name].file, source.places[name].start))


def resize(folder: str | Path, output: str | Path, *, shard_bytes: int, workers: int = 1, on_total=None) -> dict[str, Any]:
    """Write a release's folder anew in files of at most `shard_bytes` (one tensor at least in each).

    Raises:
        UserError: the source is damaged, or the output is not empty.
    """
    began = time.monotonic()
    source, target = SafetensorsFolder(folder), Path(output)
    check(not target.exists() or (target.is_dir() and not any(target.iterdir())), "--output", output, "is not empty; name a new folder")
    files: list[list[str]] = [[]]
    size = 0
    for name in in_file_order(source):
        length = source.places[name].length
        if files[-1] and size + length > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += length
    # Wider dtypes first, so that every tensor starts at a multiple of its element.
    files = [sorted(names, key=lambda name: -DTYPES[source.places[name].dtype].itemsize) for names in files]
    sizes = [sum(source.places[name].length for name in names) for names in files]
    named = [(file, tuple(names)) for file, names in zip(shard_names(len(files)), files)]
    target.mkdir(parents=True, exist_ok=True)
    tasks = [_Task(str(folder), str(target), tuple(named[a:b])) for a, b in share(sizes, workers)]
    _, peak = run_tasks(_work, tasks, on_total(sum(sizes)) if on_total else lambda n: None)
    for path in source.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copyfile(path, target / path.name)
    if len(files) > 1:
        write_index(target, ((name, file) for file, names in named for name in names), sum(sizes))
    seconds = time.monotonic() - began
    return {
        "output": str(target), "tensors": len(source.places), "files_before": len(source.files), "files": len(files), "bytes": sum(sizes),
        "workers": len(tasks), "seconds": round(seconds, 2), "mb_per_s": round(sum(sizes) / seconds / 1e6, 1), "peak_memory_bytes_above_start": peak,
    }  # fmt: skip
