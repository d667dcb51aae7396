"""The training loop's view of the data: a list of micro-batches per step, prepared ahead by a thread.

The whole state is `next_index`, the number of samples consumed since the beginning of the run. It means the same for
every number of ranks and every micro-batch size, so a run may change both when it resumes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

from megamoe.data.batch import Batch, collate
from megamoe.data.dataset import WindowDataset
from megamoe.utils.errors import UserError


class BatchLoader:
    """Yields this data-parallel rank's micro-batches of one step after another, without end.

    Samples next_index … next_index + global_batch_windows − 1 make a step; sample i of a step belongs to rank
    i mod dp_size. Ranks that differ only in tp, pp or cp pass the same dp_rank and get the same batches.

    Building a micro-batch is microseconds of slicing per window out of mapped files, so one thread keeps ahead of any
    step; `starved_s` tells when it did not.

    Args:
        dataset: where windows come from.
        global_batch_windows: windows per step over all data-parallel ranks, a multiple of dp_size.
        micro_batch_windows: windows per micro-batch; divides global_batch_windows / dp_size.
        dp_rank, dp_size: place among the data-parallel ranks.
        start_index: samples consumed so far; 0 for a new run.
        prefetch_steps: steps prepared ahead.
        pin_memory: put batches in page-locked memory, for asynchronous copies to a GPU.

    Raises:
        UserError: batch sizes that do not divide, with ones that would.
    """

    def __init__(
        self,
        dataset: WindowDataset,
        *,
        global_batch_windows: int,
        micro_batch_windows: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_index: int = 0,
        prefetch_steps: int = 2,
        pin_memory: bool = False,
    ):
        assert 0 <= dp_rank < dp_size and start_index >= 0 and prefetch_steps >= 1
        if global_batch_windows < 1 or global_batch_windows % dp_size:
            near = max(1, round(global_batch_windows / dp_size)) * dp_size
            raise UserError(f"global batch of {global_batch_windows} windows does not divide over {dp_size} data-parallel ranks; {near} would work")
        per_rank = global_batch_windows // dp_size
        if micro_batch_windows < 1 or per_rank % micro_batch_windows:
            near = max(m for m in range(1, per_rank + 1) if per_rank % m == 0 and m <= max(1, micro_batch_windows))
            raise UserError(f"micro-batch of {micro_batch_windows} windows does not divide a rank's {per_rank} windows per step; {near} would work")
        self.dataset = dataset
        self.global_batch_windows = global_batch_windows
        self.micro_batch_windows = micro_batch_windows
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.next_index = start_index
        self.starved_s = 0.0
        self._pin_memory = pin_memory
        self._ready: queue.Queue = queue.Queue(maxsize=prefetch_steps)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def step_batches(self, first_index: int) -> list[Batch]:
        """Micro-batches of this rank for the step whose first sample is `first_index`; a pure function."""
        mine = range(first_index + self.dp_rank, first_index + self.global_batch_windows, self.dp_size)
        batches = [
            collate([self.dataset.window(i) for i in mine[at : at + self.micro_batch_windows]])
            for at in range(0, len(mine), self.micro_batch_windows)
        ]
        return [batch.pin_memory() for batch in batches] if self._pin_memory else batches

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches. `next_index` moves past them: it is what a checkpoint after this step stores."""
        if self._stop.is_set():
            raise StopIteration
        if self._thread is None:
            self._thread = threading.Thread(target=self._produce, args=(self.next_index,), name="megamoe-data", daemon=True)
            self._thread.start()
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            item = self._wait()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.next_index += self.global_batch_windows
        return item

    def close(self) -> None:
        """Stop the thread. Safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            # The thread may be waiting for room in the queue.
            while self._thread.is_alive():
                try:
                    self._ready.get_nowait()
                except queue.Empty:
                    pass
                self._thread.join(timeout=0.01)
            self._thread = None

    def _wait(self) -> object:
        began = time.monotonic()
        item = self._ready.get()
        self.starved_s += time.monotonic() - began
        return item

    def _produce(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                item: object = self.step_batches(index)
            except BaseException as error:  # the consumer raises it
                item = error
            while not self._stop.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            index += self.global_batch_windows
