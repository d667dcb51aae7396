"""What scrolls by during a run: one live line on a terminal, one plain line per logged step elsewhere."""

from __future__ import annotations

import atexit
import sys
import time
from typing import TextIO

from megamoe.monitor.screen import FirstScreen, count

# On a terminal the live line is overwritten; a copy stays in the scroll-back this often.
KEEP_LINE_EVERY_S = 30.0


class Console:
    """Prints to a stream. A terminal gets rich's live line and colours, anything else gets plain lines.

    Args:
        num_steps: length of the run, for the counter and the time left.
        stream: defaults to standard output.
        live: None asks the stream whether it is a terminal.
    """

    def __init__(self, num_steps: int, *, stream: TextIO | None = None, live: bool | None = None, clock=time.monotonic):
        self.num_steps, self.stream, self.clock = num_steps, stream or sys.stdout, clock
        live = self.stream.isatty() if live is None else live
        self._rich = self._live = None
        if live:
            from rich.console import Console as RichConsole

            self._rich = RichConsole(file=self.stream, highlight=False)
        self._pace = Pace()
        self._kept_at = -1e9

    def first_screen(self, facts: FirstScreen) -> None:
        if self._rich is None:
            self._print(facts.text())
            return
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold cyan", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in facts.lines():
            grid.add_row(label, text.replace("[", r"\["))
        self._rich.print(grid)

    def log(self, step: int, row: dict) -> None:
        """Show one row. Rows that only carry an evaluation become a line of their own."""
        now = self.clock()
        if "eval_loss" in row or "eval_bits_per_byte" in row:
            self._print(f"step {step}/{self.num_steps}  " + "  ".join(_evaluation(row)))
            if "loss" not in row:
                return
        self._pace.update(step, now)
        text = progress_line(step, self.num_steps, row, self._pace.seconds_left(step, self.num_steps))
        if self._rich is None:
            self._print(text)
            return
        if now - self._kept_at >= KEEP_LINE_EVERY_S:
            self._print(text)
            self._kept_at = now
        self._show(text)

    def event(self, kind: str, message: str) -> None:
        self._print(f"{kind}: {message}")

    def finish(self, lines: list[str]) -> None:
        """End the live line and leave the closing lines."""
        self.close()
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Give the terminal its cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, text: str) -> None:
        from rich.live import Live
        from rich.text import Text

        renderable = Text(text, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            # Redirection keeps prints of libraries above the live line instead of through it.
            self._live = Live(renderable, console=self._rich, auto_refresh=False, redirect_stdout=True, redirect_stderr=True)
            self._live.start()
            atexit.register(self.close)  # a run that ends by an exception must not leave the cursor hidden
        self._live.update(renderable, refresh=True)

    def _print(self, text: str) -> None:
        if self._rich is not None:
            self._rich.print(text, markup=False)
        else:
            print(text, file=self.stream, flush=True)


class Pace:
    """Seconds per step over the recent past, from which the time left follows."""

    WINDOW = 64

    def __init__(self):
        self._seen: list[tuple[int, float]] = []

    def update(self, step: int, now: float) -> None:
        self._seen = [*self._seen[-self.WINDOW :], (step, now)]

    def seconds_left(self, step: int, num_steps: int) -> float | None:
        """None until two rows have been seen."""
        if len(self._seen) < 2:
            return None
        (first, since), (last, now) = self._seen[0], self._seen[-1]
        return (now - since) / max(1, last - first) * max(0, num_steps - step)


def progress_line(step: int, num_steps: int, row: dict, seconds_left: float | None) -> str:
    """`step 120/300  eta 2:31  loss 4.2130  bits/byte 1.9020  12.30 k tok/s  mfu 31.0%  |g| 0.820  maxvio 0.21`

    What a narrow terminal cuts off comes last.
    """
    width = len(str(num_steps))
    parts = [f"step {step:>{width}}/{num_steps}"]
    if seconds_left is not None:
        parts.append(f"eta {clock_time(seconds_left)}")
    for key, form in _SHOWN:
        value = row.get(key)
        if value is not None:
            parts.append(form(value))
    return "  ".join(parts)


_SHOWN = (
    ("loss", lambda v: f"loss {v:.4f}"),
    ("bits_per_byte", lambda v: f"bits/byte {v:.4f}"),
    ("tokens_per_s", lambda v: f"{count(v)} tok/s"),
    ("mfu", lambda v: f"mfu {100 * v:.1f}%"),
    ("grad_norm", lambda v: f"|g| {v:.3f}"),
    ("maxvio_max", lambda v: f"maxvio {v:.2f}"),
    ("mem_gib", lambda v: f"{v:.1f} GiB"),
)


def _evaluation(row: dict) -> list[str]:
    names = (("eval_loss", "held-out loss"), ("eval_bits_per_byte", "held-out bits/byte"))
    return [f"{label} {row[key]:.4f}" for key, label in names if row.get(key) is not None]


def clock_time(seconds: float) -> str:
    """2:31, 1:02:03, 3d 04:05."""
    seconds = int(round(seconds))
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
