"""The one place that decides which backend of an op runs, and says why not the others.

An op's `__init__.py` registers its backends in order of preference; a layer asks once, when it is built:

    self.kda = choose("kda_chunk", prefer=config.kda_backend, head_dim=128, gate="bounded")

`MEGAMOE_OP_<NAME>=<backend>` overrides the preference of a single op while hunting a bug. An explicit request that
cannot be met raises: it never falls through to a slower backend in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: `reference`, `triton`, `fla`, `cuda`, …
        load: imports the implementation and returns the callable. Called once, when chosen.
        why_not: given the facts of the call site, the reason it cannot serve, in words, or None when it can.
            Must be cheap and must not raise: it runs for the start-up table too.
    """

    name: str
    load: Callable[[], Callable]
    why_not: Callable[..., str | None]


@dataclass(frozen=True)
class Choice:
    """What `status()` reports about one op: the backend taken and the reasons against each one passed over."""

    op: str
    backend: str
    reasons: tuple[tuple[str, str], ...]


_BACKENDS: dict[str, list[Backend]] = {}
_CHOICES: dict[str, Choice] = {}


def register(op: str, name: str, *, load: Callable[[], Callable], why_not: Callable[..., str | None] = lambda **_: None) -> None:
    """Add a backend behind those already registered: earlier registrations are preferred."""
    backends = _BACKENDS.setdefault(op, [])
    if any(b.name == name for b in backends):
        raise ValueError(f"op {op!r} already has a backend {name!r}: each name is registered once")
    backends.append(Backend(name, load, why_not))


def choose(op: str, *, prefer: str = "auto", **facts) -> Callable:
    """Return the callable of the first backend that can serve these facts.

    Args:
        op: name under which the op registered its backends (importing the op's package does that).
        prefer: `auto`, or the name of one backend, which must then be able to serve.
        **facts: what a backend needs to judge itself (head widths, gate kind, device, …).

    Raises:
        ValueError: unknown op or backend, or an explicitly named backend that cannot serve (with its reason).
    """
    backends = _BACKENDS.get(op)
    if not backends:
        raise ValueError(f"op {op!r} is not registered; known ops: {', '.join(sorted(_BACKENDS)) or 'none'}")
    variable = f"MEGAMOE_OP_{op.upper()}"
    prefer = os.environ.get(variable, prefer)
    if prefer != "auto":
        chosen = next((b for b in backends if b.name == prefer), None)
        if chosen is None:
            raise ValueError(f"op {op!r} has no backend {prefer!r}; choose one of: auto, {', '.join(b.name for b in backends)}")
        reason = chosen.why_not(**facts)
        if reason:
            raise ValueError(f"op {op!r}: backend {prefer!r} was asked for but cannot serve: {reason}; use auto or another backend")
        _CHOICES[op] = Choice(op, chosen.name, (("", "asked for by name"),))
        return chosen.load()
    reasons = []
    for backend in backends:
        reason = backend.why_not(**facts)
        if reason is None:
            _CHOICES[op] = Choice(op, backend.name, tuple(reasons))
            return backend.load()
        reasons.append((backend.name, reason))
    raise ValueError(f"op {op!r}: no backend can serve: " + "; ".join(f"{n}: {r}" for n, r in reasons))


def status() -> list[Choice]:
    """Every choice made so far in this process, sorted by op: the start-up table."""
    return [_CHOICES[op] for op in sorted(_CHOICES)]
