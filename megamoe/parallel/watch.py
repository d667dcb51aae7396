"""When one rank stops answering, the others time out in some collective, and each blames a different one. This says who.

Every rank writes what it is about to do, when, and in which groups it is, into the process group's store, where it can be read without the
silent rank's help. When a rank's collective fails, it waits a moment, reads all ranks' notes, and tells apart those that
failed too (victims) from those that never noticed. A thread of every rank counts a beat up in the store. Where a beat stands
still, its process is gone or stopped: that rank is to blame, and those that never noticed yet live are victims to be. Where all
beats go on, a rank hangs inside its work, and it is the one that never noticed.

Beats are compared with themselves a few seconds later, not with a clock: nodes need not agree on the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from megamoe.parallel.distributed import first_line, is_communication, speaks_first
from megamoe.parallel.mesh import Mesh
from megamoe.utils.errors import RunFailed

BEAT_S = 1.0
# How long a beat may stand still. Longer than a busy machine takes to give the thread its turn.
STILL_S = 4 * BEAT_S
LEAVING = "megamoe/leaving"


class HungRank(RunFailed):
    """A collective failed because some rank did not take part in it; the message names rank, groups, phase and operation."""


class Watch:
    """This rank's notes. Call it with a few words before each phase: `watch("forward of micro-batch 3, chunk 1")`.

    One small write to the store per phase and rank. With one process nothing is written.

    Args:
        timeout_s: of the groups. Rank 0, in whose process the store lives, stays for so long after a failure of its own:
            other victims may have begun to wait later and still need the notes.
    """

    def __init__(self, mesh: Mesh, timeout_s: float):
        self.mesh, self.timeout_s = mesh, timeout_s
        self._store = dist.distributed_c10d._get_default_store() if dist.is_initialized() and mesh.world.size > 1 else None
        self._phase = "start"
        self._over = threading.Event()
        axes = {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "edp")}
        # In the note, because whoever ends up speaking may share no group with the silent rank.
        self._groups = ", ".join(f"{name} {list(axis.ranks)}" for name, axis in axes.items() if axis.size > 1) or "no group but the world"
        # The test hook of tools/prove_launch.py: "rank:step" makes that rank hang in that step's first forward.
        rank, _, step = os.environ.get("MEGAMOE_TEST_HANG", "").partition(":")
        self._hangs_in = f"step {step}: forward" if rank == str(mesh.world.rank) else None

    def __call__(self, phase: str) -> None:
        self._phase = phase
        self._write(phase, failed=False)
        while self._hangs_in and phase.startswith(self._hangs_in):
            time.sleep(60)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a failed collective inside into `HungRank`. This rank's beat goes on for as long.

        Raises:
            HungRank: with the original error as its cause.
        """
        if self._store is not None:
            threading.Thread(target=self._beat, name="megamoe-beat", daemon=True).start()
        try:
            yield
        except RuntimeError as error:
            if self._store is None or not is_communication(error):
                raise
            self._write(self._phase, failed=True)
            text, speaks = self._explain(error), speaks_first(self._store, self.mesh.world.rank)
            if self.mesh.world.rank == 0:
                # The store ends with this rank: others still read the notes, and their beats stop before it is gone.
                with contextlib.suppress(RuntimeError):
                    self._store.set(LEAVING, "")
                time.sleep(2 * BEAT_S)
            raise HungRank(text, speaks=speaks) from error
        finally:
            self._over.set()

    def _beat(self) -> None:
        # A connection of its own: the main one may be held by somebody who waits for a key.
        with contextlib.suppress(RuntimeError):
            store = self._store.clone()
            while not self._over.wait(BEAT_S) and not store.check([LEAVING]):
                store.add(_beat_key(self.mesh.world.rank), 1)

    def _write(self, phase: str, *, failed: bool) -> None:
        if self._store is not None:
            # The store lives with rank 0: when that rank is gone there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                self._store.set(_key(self.mesh.world.rank), json.dumps([time.time(), phase, failed, self._groups]))

    def _explain(self, error: RuntimeError) -> str:
        begin, beats, still = time.monotonic(), self._beats(), set()
        keeps_notes = self.mesh.world.rank == 0
        deadline = begin + STILL_S + BEAT_S + (self.timeout_s if keeps_notes else 0)
        notes = self._read()
        # The store ends with rank 0, which therefore waits until every rank that lives has noticed.
        while time.monotonic() < deadline and (keeps_notes or not still):
            if sum(not failed for rank, (_, _, failed, _) in notes.items() if rank not in still) <= (0 if still else 1):
                break
            time.sleep(BEAT_S / 5)
            notes = self._read()
            if not still and time.monotonic() > begin + STILL_S:
                still = {rank for rank, count in self._beats().items() if count == beats.get(rank) and rank in notes and not notes[rank][2]}
        mine = f"rank {self.mesh.world.rank} waited in «{self._phase}» ({first_line(error)})"
        if not notes:
            return f"rank 0, which keeps the notes of all ranks, is gone; {mine}"
        silent = [
            f"rank {rank} ({groups}) did not answer: last seen in «{phase}», {time.time() - when:.0f} s ago" + ", its process is gone or stopped" * (rank in still)
            for rank, (when, phase, failed, groups) in sorted(notes.items()) if not failed and (rank in still or not still)
        ]  # fmt: skip
        return "; ".join([*(silent or ["every rank noticed a failed collective: a connection broke"]), mine])

    def _beats(self) -> dict[int, int]:
        """Every rank's count; of all that wrote a note, or of none when the store is gone."""
        with contextlib.suppress(RuntimeError):
            return {rank: self._store.add(_beat_key(rank), 0) for rank in self._read()}
        return {}

    def _read(self) -> dict[int, tuple[float, str, bool, str]]:
        notes = {}
        with contextlib.suppress(RuntimeError):
            for rank in range(self.mesh.world.size):
                if self._store.check([_key(rank)]):
                    notes[rank] = tuple(json.loads(self._store.get(_key(rank))))
        return notes


def _beat_key(rank: int) -> str:
    return f"megamoe/beat/{rank}"


def _key(rank: int) -> str:
    return f"megamoe/phase/{rank}"

