"""The judge of tools/prove_launch.py refuses what it must: a table that cannot fail shows nothing. Not covered: the launchers (run the tool)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_that_differs_fails():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from prove_launch import Seen, _wrong
    finally:
        sys.path.pop(0)
    good = Seen(0, 1.0, "", "4 ranks", [6.0, 5.0])
    assert _wrong(good, "", good) == ""
    for other in (Seen(0, 1.0, "", "4 ranks", [6.0, 5.1]), Seen(0, 1.0, "", "2 ranks", [6.0, 5.0]), Seen(1, 1.0, "", "4 ranks", [6.0, 5.0]), Seen(0, 1.0, "", "4 ranks", [6.0]), Seen(0, 1.0, "", "4 ranks", [6.0, 5.0], orphans=1)):
        assert _wrong(other, "", good)
    line = "megamoe: rank 0: rank 3 (tp [2, 3]) did not answer: last seen in «step 2: forward», 8 s ago; rank 0 waited in «step 2: backward» (timed out in a recv operation); resume from the last checkpoint with: x"
    assert _wrong(Seen(1, 1.0, line), "hung", good) == ""
    for code, text in ((0, line), (-1, line), (1, f"{line}\n{line}"), (1, ""), (1, line.replace("tp [2, 3]", "x")), (1, line.replace("step 2: forward", "start")), (1, line.replace("operation", ""))):
        assert _wrong(Seen(code, 1.0, text), "hung", good)
