"""Run a function on several gloo ranks of this machine and bring its results back."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megamoe.parallel.distributed import free_port
from megamoe.testing.processes import CONTEXT, start


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `fn(*args)` in `world_size` fresh processes with a gloo environment set; return each rank's result.

    `fn` must be importable (module level). It finds RANK, WORLD_SIZE and MASTER_* in its environment and starts the
    process group itself.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or did not finish in time.
    """
    queue, port = CONTEXT.Queue(), free_port()
    processes = [start(_entry, fn, rank, world_size, port, queue, args) for rank in range(world_size)]
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            rank, ok, value = queue.get(timeout=timeout_s)
            if not ok:
                raise RuntimeError(f"rank {rank} of {world_size} raised:\n{value}")
            results[rank] = pickle.loads(value)
    finally:
        for p in processes:
            p.join(timeout=10)
            if p.is_alive():
                p.kill()
    return [results[r] for r in range(world_size)]


def _entry(fn: Callable[..., Any], rank: int, world_size: int, port: int, queue: Any, args: tuple) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    try:
        # By value: a queue would share tensors through a file descriptor of this process, which is about to end.
        queue.put((rank, True, pickle.dumps(fn(*args))))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
