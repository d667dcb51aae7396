"""Processes for ranks, forked from a server that has imported torch and DeepSpeed once: a rank starts in milliseconds, not in seconds.

The server is a process of its own with one thread, started with the first rank; it runs nothing else and ends with its parent.
Where it cannot import the package (another working directory), ranks import it themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["megamoe.testing.preload"])


def start(target: Callable[..., None], *args: Any) -> Any:
    """A running daemon process that calls `target(*args)` with the environment and working directory that this process has now.

    `target` must be importable, `args` picklable; queues come from `CONTEXT`.
    """
    process = CONTEXT.Process(target=_run, args=(dict(os.environ), target, args), daemon=True)
    process.start()
    return process


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple) -> None:
    # By itself a forked process has the environment in which the server was started, perhaps by another test.
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
