#!/usr/bin/env python3
"""Prove that a checkpoint fits any layout: save on A, load on B, save again, compare every byte, go on training.

    python tools/prove_reshard.py                       # the whole list of moves
    python tools/prove_reshard.py --only vpp --json reshard.json

Small models with every kind of layer on gloo ranks of this machine's CPU; on each move two steps on A, two on both. Exit code 0
when on every move all tensors are bit-equal, the data position and AdamW's count are equal, and the losses after it agree: bit for
bit on the same layout, within 1e-6 in fp32, 1e-10 in float64, 1e-2 in bf16 on another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEADER = f"{'from':16} {'to':16} {'other':26} {'engine':15} {'tensors':>7} {'bytes':>9}  {'bits':6} {'state':6} {'loss':>8}  result"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="moves whose name contains this, such as vpp2, MTP or bf16")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--timeout", type=float, default=240, help="seconds one half of a move may take before it counts as hung")
    args = parser.parse_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After the arguments: --help should not wait for these.
    from megamoe.testing.pool import RankPool
    from megamoe.testing.reshard import moves, prove

    wanted = [move for move in moves() if args.only in move.name]
    if not wanted:
        print(f"--only={args.only}: no such move; known: {'; '.join(move.name for move in moves())}", file=sys.stderr)
        return 2
    print(HEADER)
    rows, began = [], time.monotonic()
    with RankPool(max(max(move.a.world, move.b.world) for move in wanted)) as pool, tempfile.TemporaryDirectory() as folder:
        for i, move in enumerate(wanted):
            engine = move.b.engine if move.a.engine == move.b.engine else f"{move.a.engine} → {move.b.engine}"
            row = {"from": str(move.a), "to": str(move.b), "note": move.note, "engine": engine}
            try:
                v = prove(pool, move, Path(folder) / str(i), timeout_s=args.timeout)
                row |= {"tensors": v.num_tensors, "bytes": v.num_bytes, "different": v.different, "state_equal": v.state_equal, "loss": v.loss, "passed": v.passed}
                figures = f"{v.num_tensors:7} {v.num_bytes:9,}  {'equal' if not v.different else 'DIFFER':6} {'equal' if v.state_equal else 'DIFFER':6} {v.loss:8.1e}"
            except RuntimeError as error:
                row |= {"passed": False, "error": str(error)}
                figures = str(error).strip().splitlines()[-1]
            print(f"{row['from']:16} {row['to']:16} {move.note:26} {engine:15} {figures}  {'passed' if row['passed'] else 'FAILED'}", flush=True)
            for name in row.get("different", [])[:3]:
                print(f"    differs: {name}")
            rows.append(row)
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} moves passed in {time.monotonic() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
