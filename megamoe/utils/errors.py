"""One kind of error for what a user can mend: a single line with the key, the value and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from outside: printed as one line, exit code 2, no traceback. Our own bugs stay ordinary exceptions."""


class RunFailed(RuntimeError):
    """A run that ended through a fault outside of it, such as a dead or hung rank: one line, exit code 1, no traceback.

    Attributes:
        speaks: whether this rank prints the line. All ranks meet such a fault, and one line is enough.
    """

    def __init__(self, text: str, *, speaks: bool = True):
        super().__init__(text)
        self.speaks = speaks


def check(condition: bool, key: str, value: object, way_out: str) -> None:
    """Raise `UserError("key=value: way out")` unless `condition` holds."""
    if not condition:
        raise UserError(f"{key}={value}: {way_out}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ` (did you mean 'x'?)`, or the list of names when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else f" (known: {', '.join(known)})"
