#!/usr/bin/env python3
"""Check all of a checkpoint, ours or a release's folder: hashes, completeness, finite values, the set of names.

Lists every fault instead of stopping at the first. Exit code 0: whole; 1: faults; 2: it cannot be opened at all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

EXAMPLE = """\
example:
  python tools/verify_checkpoint.py runs/default/checkpoints
  python tools/verify_checkpoint.py Kimi-K3 --workers 8 model=k3_2p8t

Other arguments are Hydra overrides that name the model it must be of; without them it is held to what it says itself.
"""


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="…/step_00000200, a run's checkpoints (the newest), s3://…, or a folder with *.safetensors")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(argv)


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from launch.schema import compose
    from megamoe.checkpoint.offline.verify import verify
    from megamoe.utils.errors import check
    from megamoe.utils.progress import Bars

    check(args.workers >= 1, "--workers", args.workers, "must be 1 or more")
    config = compose(overrides).model if overrides else None
    with Bars("verifying") as bars:
        return verify(args.checkpoint, config=config, workers=args.workers, on_total=bars.start)


def show(result: dict) -> str:
    lines = [f"fault: {fault}" for fault in result["faults"]]
    if result["num_faults"] > len(result["faults"]):
        lines.append(f"fault: and {result['num_faults'] - len(result['faults'])} more")
    verdict = f"{result['num_faults']} faults" if result["num_faults"] else "whole"
    held_to = f"names of {result['model']}" if result["model"] else "names not checked, it does not say which model it is"
    lines.append(
        f"{result['checkpoint']}: {verdict}; {result['tensors']:,} tensors, {result['bytes'] / 1e9:.2f} GB, {held_to}; "
        f"{result['seconds']:.1f} s ({result['mb_per_s']:.0f} MB/s), {result['peak_memory_bytes_above_start'] / 2**20:,.0f} MiB peak above start"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
