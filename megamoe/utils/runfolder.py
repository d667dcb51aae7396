"""The run folder: one writer at a time, and what an earlier crash left behind is swept before work starts.

The lock is an `flock`: the kernel drops it when its holder dies, however it dies. Ranks write their pid and start time
beside it, so that a later start can tell an orphan of this run (a rank that outlived its launcher) from any other
process that now has the same pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
from pathlib import Path

from megamoe.utils.errors import UserError

LOCK = ".lock"


class RunFolder:
    """The folder of one run, held by this process until `release` or its end.

    Args:
        path: created when missing.

    Raises:
        UserError: the folder cannot be written, or another process holds it (its pid and host are named).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path / LOCK, "a+")
        except OSError as error:
            raise UserError(f"run.dir={path}: cannot be written ({error.strerror}); choose another with run.dir=…") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "an unknown process"
            raise UserError(f"run.dir={path}: is being written by {holder}; wait for it, stop it, or choose another run.dir") from None
        self._write(f"pid {os.getpid()} on {socket.gethostname()}")

    def _write(self, text: str) -> None:
        try:
            self._file.truncate(0)
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise UserError(f"run.dir={self.path}: cannot be written ({error.strerror}); choose another with run.dir=…") from None

    def sweep_orphans(self) -> list[int]:
        """Kill ranks of an earlier start of this run that still live on this host; returns their pids.

        Only call while holding the lock: then no rank of this run can be legitimate.
        """
        killed = []
        for record in (self.path / ".ranks").glob("*.json"):
            try:
                seen = json.loads(record.read_text())
            except (OSError, ValueError):
                continue
            pid, start = seen.get("pid"), seen.get("start")
            # Without /proc there is no start time, and then no way to tell an orphan from a stranger with its pid.
            if seen.get("host") == socket.gethostname() and start is not None and start_time(pid) == start and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            record.unlink(missing_ok=True)
        return killed

    def release(self) -> None:
        self._file.close()


def register_rank(path: str | Path, rank: int) -> None:
    """Leave this rank's pid in the run folder, for `sweep_orphans` of a later start."""
    folder = Path(path) / ".ranks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{rank}.json").write_text(json.dumps({"pid": os.getpid(), "start": start_time(os.getpid()), "host": socket.gethostname()}))


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started, or None when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def sweep_shared_memory() -> list[str]:
    """Remove shared-memory files of ours that no living process has open; returns their names."""
    removed = []
    in_use = set()
    for link in Path("/proc").glob("[0-9]*/maps"):
        try:
            in_use |= {line.split()[-1] for line in link.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue
    for file in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
        try:
            if str(file) not in in_use and file.stat().st_uid == os.getuid():
                file.unlink()
                removed.append(file.name)
        except OSError:
            continue
    return removed
