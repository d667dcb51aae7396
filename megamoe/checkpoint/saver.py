"""Save while training goes on: the main thread copies, a thread writes, one small all-reduce a step asks how far everybody is.

    saver.begin(step, pieces, state, metrics)     # at a step's end: device -> host copy, then the thread has it
    saver.poll()                                  # at every later step's end; None until the save is done or has failed
    saver.wait()                                  # at the run's end

    this rank's thread   copy of its pieces -> files of boxes -> its index
    rank 0's thread      once all have written: indices -> manifest -> commit.json, then retention

What is written is the copy, never live memory. A save that fails leaves everything that was committed as it was, and its own files are
removed. Collectives are in the main thread only.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.checkpoint.config import CheckpointConfig
from megamoe.checkpoint.format import parse_manifest, step_folder
from megamoe.checkpoint.live import Piece
from megamoe.checkpoint.objects import Objects, StoreError, Taken
from megamoe.checkpoint.retention import retire, sweep
from megamoe.checkpoint.writer import Writer, commit
from megamoe.parallel.agree import gather, sum_counts
from megamoe.parallel.mesh import Mesh

# Host memory for the copy is taken in pieces of this size: pinned allocations are rounded up to a power of two.
SLAB_BYTES = 1 << 30


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; the same on every rank, but for `num_bytes`, which rank 0 alone knows.

    Attributes:
        error: why not, in one line; "" when the checkpoint exists.
        blocked_s: how long training on this rank has waited for it: the copy and the questions.
        took_s: from `begin` to the end, most of it beside training.
    """

    step: int
    error: str
    blocked_s: float
    took_s: float
    num_bytes: int = 0


class Saver:
    """Saves of one run, one at a time. Methods that say so are collective over the control group.

    Args:
        place: where checkpoints lie.
        run_id: begins the name of every attempt, so that left-overs of this run can be told from another run's.
    """

    def __init__(self, place: Objects, config: CheckpointConfig, mesh: Mesh, device: torch.device, run_id: str):
        self.place, self.config, self.mesh, self.device, self.run_id = place, config, mesh, device, run_id
        self.blocked_s = 0.0
        self._first = mesh.world.rank == 0
        self._copy = _HostCopy(device)
        self._current: _Save | None = None
        self._cleanup: Future = _in_background(lambda: None)

    @property
    def pending(self) -> bool:
        """Whether a save is under way. The same on every rank."""
        return self._current is not None

    def sweep(self) -> None:
        """Remove what saves of this run left behind that did not finish. Rank 0, with the run folder locked, before the first save."""
        sweep(self.place, self.run_id)

    def begin(self, step: int, pieces: Sequence[Piece], state: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        """Copy this rank's pieces and start to write them. Collective; there must be no save under way.

        Args:
            pieces: all that this rank holds; those it does not write are left out.
            state: JSON facts, see docs/checkpoint.md; rank 0's count.
            metrics: for the choice of the best.

        Waits for the device only when host memory for the copy must be made (the first time).
        """
        assert self._current is None, "a save is under way"
        started = time.perf_counter()
        attempt = gather(self.mesh, f"{self.run_id}{uuid.uuid4().hex[:8]}" if self._first else None)[0]
        mine = [piece for piece in pieces if piece.writes]
        try:
            copies = self._copy.take([piece.values for piece in mine])
            written = _in_background(self._write, step, attempt, mine, copies)
        except (RuntimeError, MemoryError) as error:  # host memory for the copy; no reason to end the run
            written = Future()
            written.set_exception(error)
        self._current = _Save(step, attempt, state, metrics or {}, started, written)
        self._count_blocked(started)

    def poll(self) -> SaveResult | None:
        """How the save under way ended, or None while it goes on, or when there is none. Collective while `pending`."""
        save = self._current
        if save is None:
            return None
        started = time.perf_counter()
        result = self._committed(save) if save.all_written else self._ask_writers(save)
        self._count_blocked(started)
        if result is not None:
            self._current = None
            took = time.perf_counter() - save.started
            return SaveResult(save.step, result, save.blocked_s, took, save.num_bytes)
        return None

    def wait(self) -> SaveResult | None:
        """As `poll`, but stay until the save has ended. Collective."""
        while self.pending:
            future = self._current.commit or self._current.written
            started = time.perf_counter()
            # Not for longer: whoever is done already waits for the others in `poll`, and collectives time out.
            if not future.done():
                _wait(future, 0.2)
            self._count_blocked(started)
            if (result := self.poll()) is not None:
                # The process may be about to end, and its threads with it.
                _wait(self._cleanup, 5.0)
                return result
        return None

    def _count_blocked(self, started: float) -> None:
        elapsed = time.perf_counter() - started
        self.blocked_s += elapsed
        if self._current is not None:
            self._current.blocked_s += elapsed

    def _ask_writers(self, save: _Save) -> str | None:
        done = save.written.done()
        failed = done and save.written.exception() is not None
        num_done, num_failed = sum_counts(self.mesh, [int(done), int(failed)])
        # Files of an attempt that failed can go when nobody adds to them any more.
        if num_done < self.mesh.world.size:
            return None
        if num_failed:
            return self._failed(save, save.written)
        save.all_written = True
        if self._first:
            save.commit = _in_background(self._commit, save)
        return None

    def _committed(self, save: _Save) -> str | None:
        done = save.commit is not None and save.commit.done()
        failed = done and save.commit.exception() is not None
        num_done, num_failed = sum_counts(self.mesh, [int(done), int(failed)])
        if not num_done:
            return None
        if num_failed:
            return self._failed(save, save.commit)
        save.num_bytes = save.commit.result() if self._first else 0
        return ""

    def _failed(self, save: _Save, future: Future | None) -> str:
        error = future.exception() if future is not None and future.done() else None
        if self._first:
            # A store that is down keeps the files; the next start sweeps them.
            self._cleanup = _in_background(self._remove, step_folder(save.step), save.attempt)
        texts = gather(self.mesh, f"{error}" or type(error).__name__ if error is not None else "")
        return next(text for text in texts if text)

    def _write(self, step: int, attempt: str, pieces: list[Piece], copies: _Copies) -> None:
        """This rank's files and index. In the thread."""
        writer = Writer(self.place, step, attempt, self.mesh.world.rank)
        for piece, values in zip(pieces, copies.ready(), strict=True):
            writer.add(piece.name, values, piece.box[0], piece.shape)
        self.place.put(_index(step, attempt, self.mesh.world.rank), writer.close().to_json())

    def _remove(self, folder: str, attempt: str) -> None:
        self.place.delete_folder(f"{folder}/{attempt}")
        self.place.delete_empty(folder)

    def _commit(self, save: _Save) -> int:
        """The manifest and the pointer; returns the bytes of all files. In rank 0's thread."""
        names = [_index(save.step, save.attempt, rank) for rank in range(self.mesh.world.size)]
        try:
            parts = [parse_manifest(self.place.get(name), name, complete=False) for name in names]
        except FileNotFoundError as error:
            raise StoreError(f"{error} was written by another rank and is not there; checkpoint.dir must be one place that all nodes share") from None
        try:
            manifest = commit(self.place, save.step, save.attempt, parts, save.state, save.metrics)
        except Taken:
            raise Taken(f"step {save.step} is committed already by another run in {self.place.location}; choose another checkpoint.dir") from None
        self.place.delete(names)
        retire(self.place, self.config)
        return sum(size for size, _ in manifest.files.values())


@dataclass
class _Save:
    step: int
    attempt: str
    state: dict[str, Any]
    metrics: dict[str, float]
    started: float
    written: Future
    blocked_s: float = 0.0
    all_written: bool = False
    commit: Future | None = None
    num_bytes: int = 0


class _Copies:
    def __init__(self, tensors: list[torch.Tensor], event: torch.cuda.Event | None):
        self._tensors, self._event = tensors, event

    def ready(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class _HostCopy:
    """Host memory of this rank's pieces, kept from save to save: pinned, and filled by a stream of its own, where there is a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self._views: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def take(self, live: list[torch.Tensor]) -> _Copies:
        if [(v.shape, v.dtype) for v in self._views] != [(v.shape, v.dtype) for v in live]:
            self._views = []
            self._views = self._allocate(live)
        if self._stream is None:
            for view, values in zip(self._views, live):
                view.copy_(values)
            return _Copies(self._views, None)
        # What the next step writes must wait for the copy, and the copy for what this step wrote; the host for neither.
        now = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for view, values in zip(self._views, live):
                view.copy_(values, non_blocking=True)
        event = self._stream.record_event()
        now.wait_event(event)
        return _Copies(self._views, event)

    def _allocate(self, live: list[torch.Tensor]) -> list[torch.Tensor]:
        views, slab, used = [], torch.empty(0, dtype=torch.uint8), 0
        left = sum(_padded(values) for values in live)
        for values in live:
            size = _padded(values)
            if used + size > slab.numel():
                slab, used = torch.empty(max(size, min(left, SLAB_BYTES)), dtype=torch.uint8, pin_memory=self._stream is not None), 0
            views.append(slab[used : used + values.numel() * values.element_size()].view(values.dtype).view(values.shape))
            used, left = used + size, left - size
        return views


def _padded(values: torch.Tensor) -> int:
    return -(-values.numel() * values.element_size() // 64) * 64


def _index(step: int, attempt: str, rank: int) -> str:
    return f"{step_folder(step)}/{attempt}/index-{rank:05d}.json"


def _in_background(action: Callable[..., Any], *args: Any) -> Future:
    """Run an action in a thread that does not keep the process alive: whoever quits at once gives up the save under way."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(action(*args))
        except BaseException as error:  # noqa: BLE001 - whatever ends a save is reported, not lost with the thread
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _wait(future: Future, seconds: float) -> None:
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        pass
