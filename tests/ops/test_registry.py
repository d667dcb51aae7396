"""One registry chooses a backend, keeps the reasons against the others, and never answers a named request with another one.

Why it matters: a silent fall to a slower backend costs a hundredfold and is noticed days later.
Not covered: the reasons of particular ops (their own tests).
"""

from __future__ import annotations

import itertools

import pytest

from megamoe.ops.registry import choose, register, status

_fresh = itertools.count()


@pytest.fixture
def op():
    """An op with a picky backend preferred over a plain one; names are unique because the registry is per process."""
    name = f"registry_test_{next(_fresh)}"
    loads = []

    def load(backend):
        def function():
            loads.append(backend)
            return lambda: backend

        return function

    register(name, "fast", load=load("fast"), why_not=lambda *, width=128, **_: None if width == 128 else f"width {width} is not 128")
    register(name, "plain", load=load("plain"))
    return name, loads


def test_first_backend_that_can_serve_is_taken_and_only_it_is_loaded(op):
    name, loads = op
    assert choose(name, width=128)() == "fast" and loads == ["fast"]


def test_a_refusal_falls_to_the_next_and_its_reason_is_kept(op):
    name, _ = op
    assert choose(name, width=64)() == "plain"
    choice = next(c for c in status() if c.op == name)
    assert choice.backend == "plain" and choice.reasons == (("fast", "width 64 is not 128"),)


def test_a_named_backend_that_cannot_serve_raises_with_the_reason(op):
    name, loads = op
    with pytest.raises(ValueError, match="width 64 is not 128"):
        choose(name, prefer="fast", width=64)
    assert loads == []


def test_an_unknown_backend_or_op_names_the_choices(op):
    name, _ = op
    with pytest.raises(ValueError, match="auto, fast, plain"):
        choose(name, prefer="slow")
    with pytest.raises(ValueError, match="not registered"):
        choose("no_such_op")


def test_the_environment_overrides_the_preference_of_one_op(op, monkeypatch):
    name, _ = op
    monkeypatch.setenv(f"MEGAMOE_OP_{name.upper()}", "plain")
    assert choose(name, prefer="fast", width=128)() == "plain"


def test_no_backend_that_can_serve_lists_every_reason():
    name = f"registry_test_{next(_fresh)}"
    for backend, reason in (("a", "too old"), ("b", "too small")):
        register(name, backend, load=lambda: None, why_not=lambda reason=reason, **_: reason)
    with pytest.raises(ValueError, match="a: too old; b: too small"):
        choose(name)


def test_a_name_is_registered_once(op):
    name, _ = op
    with pytest.raises(ValueError, match="already has a backend"):
        register(name, "fast", load=lambda: None)
