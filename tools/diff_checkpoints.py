#!/usr/bin/env python3
"""Compare two checkpoints tensor by tensor: names, dtypes, shapes, values. Two of ours, or two folders of safetensors.

Parts with equal hashes are not read. Exit code 0: equal; 1: they differ; 2: one cannot be opened.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

EXAMPLE = """\
example:
  python tools/diff_checkpoints.py runs/a/checkpoints/step_00000200 runs/b/checkpoints/step_00000200 --only model/
  python tools/diff_checkpoints.py Kimi-K3 Kimi-K3-tuned
"""


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="…/step_00000200, a run's checkpoints (the newest), s3://…, or a folder with *.safetensors")
    parser.add_argument("second", help="the other, of the same kind")
    parser.add_argument("--only", default="", metavar="PREFIX", help="compare names that start so, such as model/ or optim/master/")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="largest absolute difference that counts as equal (default 0: bytes)")
    parser.add_argument("--most", type=int, default=20, metavar="N", help="lines of each kind to print (default 20); --json has all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    show.most = args.most
    return args, []


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from megamoe.checkpoint.offline.compare import compare
    from megamoe.utils.errors import check
    from megamoe.utils.progress import Bars

    check(args.tolerance >= 0, "--tolerance", args.tolerance, "must be 0 or more")
    with Bars("comparing") as bars:
        return compare(args.first, args.second, prefix=args.only, tolerance=args.tolerance, on_total=bars.start)


def show(result: dict) -> str:
    def some(lines: list[str]) -> list[str]:
        return lines[: show.most] + ([f"  … and {len(lines) - show.most} more"] if len(lines) > show.most else [])

    lines = []
    for title, key in (("only in first", "only_in_first"), ("only in second", "only_in_second")):
        lines += some([f"{title}: {name}" for name in result[key]])
    lines += some([f"dtype or shape: {name} {' '.join(a)} | {' '.join(b)}" for name, (a, b) in result["other_dtype_or_shape"].items()])
    widest = sorted(result["changed"].items(), key=lambda item: -item[1]["relative_norm"])
    lines += some([f"values: {name} largest {d['max_abs']:.3g}, relative {d['relative_norm']:.3g}, {d['num_different']:,} elements" for name, d in widest])
    lines.append(
        f"{result['equal']:,} tensors equal ({result['equal_by_hash']:,} by hash), {len(result['changed']):,} of other values, {len(result['other_dtype_or_shape']):,} of other dtype or shape, "
        f"{len(result['only_in_first']):,} and {len(result['only_in_second']):,} on one side only; {result['seconds']:.1f} s, {result['peak_memory_bytes_above_start'] / 2**20:,.0f} MiB peak above start"
    )
    return "\n".join(lines)


show.most = 20

if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
