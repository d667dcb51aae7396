"""Run tasks in a few processes, with progress, and say how much memory they took."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megamoe.utils.errors import RunFailed, UserError

OnBytes = Callable[[int], None]


def memory_bytes(key: str) -> int:
    """`VmRSS` or `VmHWM` of this process; 0 where there is no /proc.

    VmHWM, not getrusage: the latter keeps what the parent had before exec.
    """
    try:
        with open("/proc/self/status") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":")), 0)
    except OSError:
        return 0


def return_freed_memory() -> None:
    """Have glibc give buffers of a MiB and more back when they are freed, instead of keeping them in an arena per thread.

    Without it the peak of a long conversion was a third above that of a short one. Nothing happens on another C library.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((-3, 1 << 20), (-8, 2)):  # M_MMAP_THRESHOLD, M_ARENA_MAX
            libc.mallopt(parameter, value)
    except (OSError, AttributeError):
        return


def run_tasks(function: Callable[[Any, OnBytes], Any], tasks: Sequence[Any], on_bytes: OnBytes) -> tuple[list[Any], int]:
    """function(task, on_bytes) for every task, each in a process of its own; one task runs here.

    Args:
        function: of a module's top level; tasks and results must pickle.
        on_bytes: told in this process how many more bytes are done.

    Returns: results in the tasks' order, and the sum of the processes' peak memory above what they had when they began.

    Raises:
        UserError: what a task raised. RunFailed: a process died. RuntimeError: any other exception, with its traceback.
    """
    if len(tasks) == 1:
        return_freed_memory()
        before = memory_bytes("VmRSS")
        result = function(tasks[0], on_bytes)
        return [result], max(memory_bytes("VmHWM") - before, 0)
    # Not fork: torch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    results: list[Any] = [None] * len(tasks)
    peak = 0
    try:
        for task in tasks:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, task, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        left = dict(zip(pipes, range(len(tasks))))
        while left:
            for pipe in multiprocessing.connection.wait(list(left)):
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process = processes[left[pipe]]
                    process.join()
                    raise RunFailed(f"worker {left[pipe]} died (exit code {process.exitcode}); -9 is often too little memory: use fewer --workers") from None
                if kind == "bytes":
                    on_bytes(value)
                elif kind == "user":
                    raise UserError(value)
                elif kind == "error":
                    raise RuntimeError(f"worker {left[pipe]} failed:\n{value}")
                else:
                    results[left.pop(pipe)], above = value
                    peak += above
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return results, peak


def _child(function: Callable[[Any, OnBytes], Any], task: Any, pipe) -> None:
    torch.set_num_threads(1)
    return_freed_memory()
    before = memory_bytes("VmRSS")
    try:
        result = function(task, lambda n: pipe.send(("bytes", n)))
        pipe.send(("done", (result, max(memory_bytes("VmHWM") - before, 0))))
    except UserError as error:
        pipe.send(("user", str(error)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()


def share(sizes: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """Consecutive ranges of items, of about equal bytes; fewer than `workers` where there are fewer items."""
    total, ranges, start, seen = sum(sizes), [], 0, 0
    for i, size in enumerate(sizes):
        seen += size
        if seen * workers >= total * (len(ranges) + 1) and len(ranges) < workers - 1:
            ranges.append((start, i + 1))
            start = i + 1
    if start < len(sizes) or not ranges:
        ranges.append((start, len(sizes)))
    return ranges
