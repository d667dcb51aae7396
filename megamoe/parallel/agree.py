"""Decisions that every rank must take together: errors on one rank become the same error on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megamoe.parallel.mesh import Mesh
from megamoe.utils.errors import RunFailed, UserError


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """Every rank's small picklable value, in rank order. Collective over the control group (CPU)."""
    if mesh.control is None:
        return [value]
    out: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(out, value, group=mesh.control)
    return out


def on_every_rank(mesh: Mesh, action: Callable[[], Any]) -> Any:
    """Run an action on every rank; what one of them raises ends all. Collective; the action itself must not be.

    Raises:
        UserError: on every rank, the lowest rank's first.
        RunFailed: on ranks where the action went well while another rank met an error of another kind, which that rank raises.
    """
    result, problem, own = None, None, None
    try:
        result = action()
    except UserError as error:
        problem = (True, str(error))
    except Exception as error:
        problem, own = (False, f"rank {mesh.world.rank}: {type(error).__name__}: {error}"), error
    problems = [p for p in gather(mesh, problem) if p]
    if own is not None:
        raise own
    if problems:
        by_user, text = problems[0]
        raise UserError(text) if by_user else RunFailed(text, speaks=mesh.world.rank == 0)
    return result


def on_first_rank(mesh: Mesh, action: Callable[[], Any]) -> Any:
    """Run an action on rank 0 while the others wait; its (small, picklable) result goes to all, its UserError too. Collective."""
    mine = on_every_rank(mesh, action if mesh.world.rank == 0 else lambda: None)
    return gather(mesh, mine)[0]


def sum_counts(mesh: Mesh, counts: Sequence[int]) -> list[int]:
    """Sum of host integers over the world. Collective over the control group: never waits for the device."""
    if mesh.control is None:
        return list(counts)
    total = torch.tensor(counts, dtype=torch.int64)
    dist.all_reduce(total, group=mesh.control)
    return total.tolist()


def same_everywhere(config: dict) -> None:
    """Compare the resolved configuration of all ranks. Collective over the default group: ranks that differ in their layout
    could not even build a mesh together.

    Raises:
        UserError: names the first key that differs, its values and the ranks that hold them.
    """
    flat = dict(_flatten(config))
    everyone = [flat]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, flat)
    reference, *others = everyone
    for rank, other in enumerate(others, start=1):
        for key in sorted(reference.keys() | other.keys()):
            mine, theirs = reference.get(key), other.get(key)
            if mine != theirs:
                raise UserError(f"{key}={theirs}: rank {rank} differs from rank 0 ({mine}); start every rank with the same overrides and files")


def _flatten(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
