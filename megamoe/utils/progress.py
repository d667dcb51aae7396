"""Progress of a tool in bytes: a bar on a terminal, a line every few seconds in logs and pipes. Both on stderr."""

from __future__ import annotations

import sys
import time


class PlainProgress:
    """A line every few seconds."""

    def __init__(self, total_bytes: int, verb: str):
        self._total, self._verb = max(total_bytes, 1), verb
        self._done = 0
        self._began = self._said = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said >= 5:
            self._said = now
            rate = self._done / (now - self._began)
            left_s = max(self._total - self._done, 0) / max(rate, 1)
            print(f"{self._verb} {self._done / self._total:6.1%}  {rate / 1e6:.1f} MB/s  {left_s:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class BarProgress:
    """A bar on a terminal."""

    def __init__(self, total_bytes: int, verb: str):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=total_bytes)

    def __call__(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()


def progress(total_bytes: int, verb: str) -> PlainProgress | BarProgress:
    """The one that suits stderr. Call it with bytes done since the last call; use it as a context."""
    return (BarProgress if sys.stderr.isatty() else PlainProgress)(total_bytes, verb)


class Bars:
    """A progress that starts once its total is known: hand `start` to what finds that out. A context; ends what it began."""

    def __init__(self, verb: str):
        self._verb = verb
        self._running: list[PlainProgress | BarProgress] = []

    def start(self, total_bytes: int) -> PlainProgress | BarProgress:
        self._running.append(progress(total_bytes, self._verb))
        return self._running[-1].__enter__()

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *error) -> None:
        for bar in self._running:
            bar.__exit__(*error)
