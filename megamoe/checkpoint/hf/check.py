"""Names, dtypes and shapes of a release against what the configuration says, from headers alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from megamoe.checkpoint.hf.files import Place
from megamoe.checkpoint.hf.names import Names, Row
from megamoe.utils.errors import UserError

# How many names of each kind a report lists; one wrong switch of the model can miss a hundred thousand.
LISTED = 20


class NamesDiffer(UserError):
    """The release is not what the configuration describes.

    Attributes:
        lines: one sentence for each name, at most LISTED of a kind.
    """

    def __init__(self, text: str, lines: list[str]):
        super().__init__(text)
        self.lines = lines


def report(missing: Iterable[str], extra: Iterable[str]) -> list[str]:
    """Sentences for names that are missing or unknown, each with the nearest of the other kind."""
    missing, extra = sorted(missing), sorted(extra)
    lines = []
    for kind, names, others in (("missing", missing, extra), ("unknown", extra, missing)):
        for name in names[:LISTED]:
            # Candidates are few: names that differ in one place mostly have the same number of parts.
            near = difflib.get_close_matches(name, [o for o in others if o.count(".") == name.count(".")][:2000] or others[:2000], n=1, cutoff=0.6)
            lines.append(f"{kind}: {name}" + (f" (nearest {'there' if kind == 'missing' else 'expected'}: {near[0]})" if near else ""))
        if len(names) > LISTED:
            lines.append(f"{kind}: and {len(names) - LISTED} more")
    return lines


def heads_shapes(row: Row, head_dim: int) -> set[tuple[int, ...]]:
    """Every form in which releases were seen to store A_log."""
    (heads,) = row.shape
    return {(heads,), (max(head_dim, heads),), (1, 1, heads, 1)}


def check_release(names: Names, places: Mapping[str, Place], where: str) -> dict[str, list]:
    """Compare every header with the table. Reads no data.

    Text tensors may be BF16 or F32, whichever the table says: releases differ there, and both fit without loss.

    Returns: {released name (with `{e}` for experts): [dtype, shape]} where the release deviates from the table in such a
        way, so that an export gives back what came.

    Raises:
        NamesDiffer: missing or unknown tensors, or a dtype or shape that does not fit, all of them listed.
    """
    deviations: dict[str, list] = {}
    missing, wrong, expected = [], [], set()
    for group in names.groups():
        is_expert = group[0].form == "experts"
        for row in group:
            found = set()
            for expert in range(row.shape[0] if is_expert else 1):
                for stored in row.stored(expert):
                    expected.add(stored.name)
                    place = places.get(stored.name)
                    if place is None:
                        missing.append(stored.name)
                        continue
                    shapes = heads_shapes(row, names.config.kda.head_dim) if row.form == "heads" else {stored.shape}
                    dtypes = {"U8"} if stored.dtype == "U8" else {"BF16", "F32"}
                    if place.shape not in shapes:
                        wrong.append(f"shape: {stored.name} has {list(place.shape)}, expected {' or '.join(str(list(s)) for s in sorted(shapes))}")
                    elif place.dtype not in dtypes and row.form != "passed":
                        wrong.append(f"dtype: {stored.name} is {place.dtype}, expected {' or '.join(sorted(dtypes))}")
                    elif (place.dtype, place.shape) != (stored.dtype, stored.shape):
                        deviations[row.released] = [place.dtype, list(place.shape)]
                    if stored.dtype != "U8":
                        found.add(place.dtype)
            if len(found) > 1:
                wrong.append(f"dtype: {row.released} is {' here and '.join(sorted(found))} there; experts of a layer must share one")
    extra = [name for name in places if name not in expected]
    if missing or extra or wrong:
        counts = [f"{len(x)} {what}" for x, what in ((missing, "missing"), (extra, "unknown"), (wrong, "of another shape or dtype")) if x]
        first = (missing or extra or [wrong[0].split(": ")[1]])[0]
        raise NamesDiffer(f"folder={where}: {', '.join(counts)} of {len(expected)} tensors, the first is {first}; is it this model's release?", report(missing, extra) + wrong[:LISTED])
    return deviations
