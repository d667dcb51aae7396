"""Worker processes that stay: many distributed runs without starting processes for each of them."""

from __future__ import annotations

import os
import pickle
import queue as queues
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.parallel.distributed import free_port
from megamoe.testing.processes import CONTEXT, start

RUNS_PER_PROCESS = 16


@dataclass
class _Worker:
    process: Any
    inbox: Any
    runs: int = 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class RankPool:
    """Up to `size` processes, each a rank of whatever run comes next. A context manager; leaving it ends them.

    A run that raises or hangs ends the pool's processes; the next run starts fresh ones. So a broken layout costs its own
    time and nothing else.
    """

    def __init__(self, size: int):
        self.size = size
        self._workers: list[_Worker] = []
        self._results = CONTEXT.Queue()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
        """`fn(*args)` on ranks 0 … world_size-1, each with a gloo environment set; every rank's result in order.

        `fn` must be importable; it starts and ends the process group itself.

        Raises:
            RuntimeError: a rank raised (its traceback is in the message) or did not finish in time.
        """
        assert world_size <= self.size, f"{world_size} ranks of a pool of {self.size}"
        for i, worker in enumerate(self._workers[:world_size]):
            # gloo keeps the threads of process groups that are gone: after a hundred layouts they were thousands, all polling.
            if worker.runs == RUNS_PER_PROCESS:
                worker.end()
                self._workers[i] = self._start()
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        port, payload = free_port(), pickle.dumps((fn, args))
        for rank, worker in enumerate(self._workers[:world_size]):
            worker.runs += 1
            worker.inbox.put((rank, world_size, port, payload))
        results: dict[int, Any] = {}
        try:
            while len(results) < world_size:
                rank, ok, value = self._results.get(timeout=timeout_s)
                if not ok:
                    raise RuntimeError(f"rank {rank} of {world_size} raised:\n{value}{self._others()}")
                results[rank] = pickle.loads(value)
        except queues.Empty:
            waiting = sorted(set(range(world_size)) - set(results))
            self.stop()
            raise RuntimeError(f"ranks {waiting} of {world_size} did not finish in {timeout_s:.0f} s") from None
        except RuntimeError:
            self.stop()
            raise
        return [results[r] for r in range(world_size)]

    def _start(self) -> _Worker:
        inbox = CONTEXT.Queue()
        return _Worker(start(_serve, inbox, self._results), inbox)

    def _others(self) -> str:
        """What other ranks raise within two seconds: the first to report is often a victim whose peer hung up."""
        text = ""
        try:
            while True:
                rank, ok, value = self._results.get(timeout=2)
                if not ok:
                    text += f"\nrank {rank} raised:\n{value}"
        except queues.Empty:
            return text

    def stop(self) -> None:
        """End the workers now."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._results = CONTEXT.Queue()


def _serve(inbox: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while True:
        rank, world_size, port, payload = inbox.get()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
        try:
            fn, args = pickle.loads(payload)
            results.put((rank, True, pickle.dumps(fn(*args))))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
