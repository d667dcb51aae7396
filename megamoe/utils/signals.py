"""A polite stop: the first signal asks for it, a second Ctrl-C means now."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

# A terminal's Ctrl-C reaches every process of the group, and launchers forward it: repeats this close are one press.
ONE_PRESS_S = 2.0


class StopRequest:
    """Set by SIGINT, SIGTERM or by `ask`; read once per step.

    Attributes:
        reason: why a stop was asked for, or None.
    """

    def __init__(self):
        self.reason: str | None = None
        self._pressed_s: float | None = None

    def __bool__(self) -> bool:
        return self.reason is not None

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def handle(self, signum: int, frame) -> None:
        """SIGTERM only ever asks; SIGINT more than `ONE_PRESS_S` after the first SIGINT raises KeyboardInterrupt."""
        now = time.monotonic()
        if signum == signal.SIGINT:
            if self._pressed_s is not None and now - self._pressed_s > ONE_PRESS_S:
                raise KeyboardInterrupt
            self._pressed_s = self._pressed_s or now
        self.ask(signal.Signals(signum).name)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Handle SIGINT and SIGTERM for the time of a run; the former handlers come back after it."""
    stop = StopRequest()
    before = {s: signal.signal(s, stop.handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
