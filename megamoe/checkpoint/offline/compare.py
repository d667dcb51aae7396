"""Two checkpoints of one kind, tensor by tensor: which names, dtypes, shapes and values differ, and by how much."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.offline.opened import Opened
from megamoe.utils.errors import check
from megamoe.utils.workers import memory_bytes


def same_parts(a: Opened, b: Opened, name: str) -> bool:
    """Whether two of ours have the tensor in the same boxes with the same hashes: equal without reading."""
    if a.checkpoint is None or b.checkpoint is None:
        return False
    return sorted((p.box, p.hash) for p in a.checkpoint.entry(name).parts) == sorted((p.box, p.hash) for p in b.checkpoint.entry(name).parts)


def difference(a: Opened, b: Opened, name: str, on_bytes) -> dict[str, Any] | None:
    """Sizes of a tensor's difference, float64; None when the bytes are equal. NaN equals NaN of the same bits."""
    square, base, largest, count, equal = 0.0, 0.0, 0.0, 0, True
    for x, y in zip(a.rows(name), b.rows(name)):
        on_bytes(x.numel() * x.element_size())
        if torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8)):
            base += float(x.double().square().sum()) if not equal else 0.0
            continue
        equal = False
        p, q = x.double(), y.double()
        d = (p - q).abs()
        # A NaN on one side only must show as the largest difference, not vanish in a maximum.
        largest = max(largest, float(torch.nan_to_num(d, nan=float("inf")).max()))
        square += float(d.square().sum())
        base += float(p.square().sum())
        count += int((p != q).sum())
    if equal:
        return None
    return {"max_abs": largest, "relative_norm": (square / base) ** 0.5 if base else float("inf") if square else 0.0, "num_different": count}


def compare(first: str | Path, second: str | Path, *, prefix: str = "", tolerance: float = 0.0, on_total=None) -> dict[str, Any]:
    """Compare all tensors whose names start with `prefix`.

    Args:
        tolerance: largest absolute difference that counts as equal.

    Returns: facts for people; `faults` is true when anything differs beyond the tolerance.

    Raises:
        UserError: one cannot be opened, or they are of different kinds.
    """
    began, before = time.monotonic(), memory_bytes("VmRSS")
    a, b = Opened(first), Opened(second)
    check(a.kind == b.kind, "checkpoints", f"{first} {second}", f"are {a.kind} and {b.kind}; convert one with tools/convert_checkpoint.py")
    names_a, names_b = ({n for n in x.specs if n.startswith(prefix)} for x in (a, b))
    common = sorted(names_a & names_b)
    other_spec = [n for n in common if a.specs[n] != b.specs[n]]
    other_shape = {n for n in other_spec if a.specs[n][1] != b.specs[n][1]}
    todo = [n for n in common if n not in other_shape and not (n not in other_spec and same_parts(a, b, n))]
    on_bytes = on_total(sum(a.num_bytes(n) for n in todo)) if on_total else lambda n: None
    changed = {}
    for name in todo:
        found = difference(a, b, name, on_bytes)
        # Of another dtype the bytes differ anyway, and with a tolerance they may: then only values count.
        by_value = name in other_spec or tolerance > 0
        if found is not None and not (by_value and found["max_abs"] <= tolerance):
            changed[name] = found
    return {
        "first": a.location, "second": b.location, "kind": a.kind, "only_in_first": sorted(names_a - names_b), "only_in_second": sorted(names_b - names_a),
        "other_dtype_or_shape": {n: [list(map(str, a.specs[n])), list(map(str, b.specs[n]))] for n in other_spec}, "changed": changed,
        "equal": len(common) - len(changed.keys() | set(other_spec)), "equal_by_hash": len(common) - len(todo) - len(other_shape), "seconds": round(time.monotonic() - began, 2),
        "peak_memory_bytes_above_start": max(memory_bytes("VmHWM") - before, 0), "faults": bool(changed or other_spec or names_a != names_b),
    }  # fmt: skip
