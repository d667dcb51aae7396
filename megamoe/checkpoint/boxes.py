"""Boxes: axis-aligned parts of a tensor, (offset, shape). What a rank holds of a tensor is always a few of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of_range(start: int, count: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements [start, start + count) of a row-major array as boxes, in the order of their elements.

    A ZeRO fragment is such a range; it falls into at most 2·dims − 1 boxes.
    """
    if count <= 0:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (count,)
        return
    inner = math.prod(shape[1:])
    row, column = divmod(start, inner)
    if column or count < inner:
        part = min(count, inner - column)
        for offset, size in boxes_of_range(column, part, shape[1:]):
            yield (row, *offset), (1, *size)
    else:
        part = count // inner * inner
        yield (row, *[0] * (len(shape) - 1)), (count // inner, *shape[1:])
    yield from boxes_of_range(start + part, count - part, shape)


def pieces(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """A box cut along its leading dims so that no piece is larger than `max_elements`, in the order of their elements."""
    total = math.prod(shape)
    if total <= max_elements or not shape:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    rows = max_elements // inner
    for row in range(0, shape[0], max(rows, 1)):
        if rows:
            yield (row, *[0] * (len(shape) - 1)), (min(rows, shape[0] - row), *shape[1:])
        else:
            for offset, size in pieces(shape[1:], max_elements):
                yield (row, *offset), (1, *size)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    end = tuple(min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1]))
    return None if any(e <= o for o, e in zip(offset, end)) else (offset, tuple(e - o for o, e in zip(offset, end)))


def shifted(box: Box, by: tuple[int, ...]) -> Box:
    return tuple(o + d for o, d in zip(box[0], by)), box[1]


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Indices of a box within a tensor that starts at `origin`."""
    return tuple(slice(o - s, o - s + n) for o, n, s in zip(box[0], box[1], origin))


def uncovered(shape: tuple[int, ...], boxes: Iterable[Box]) -> str:
    """"" when the boxes fill the shape exactly once, else what is wrong.

    Inside the shape, no two with the same start, and volumes that sum to the whole: overlap of one pair needs a hole
    elsewhere to pass, so pairs are compared too where boxes are few; writers cut on a grid, and there volume decides.
    """
    boxes = list(boxes)
    for offset, size in boxes:
        if len(offset) != len(shape) or len(size) != len(shape) or any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offset, size, shape)):
            return f"the part {size} at {offset} lies outside {shape}"
    if len({box[0] for box in boxes}) != len(boxes):
        return "two parts start at the same place"
    if len(boxes) <= 256 and any(intersect(a, b) for i, a in enumerate(boxes) for b in boxes[:i]):
        return "two parts overlap"
    missing = math.prod(shape) - sum(math.prod(size) for _, size in boxes)
    return f"{missing} of {math.prod(shape)} elements are missing" if missing > 0 else "parts overlap" if missing < 0 else ""
