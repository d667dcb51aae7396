#!/usr/bin/env python3
"""Cut a checkpoint anew, offline: ours along a target layout, so that each rank reads only its bytes; or a folder of
safetensors into files of another size (larger files merge, smaller ones split). Values do not change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

EXAMPLE = """\
example:
  python tools/shard_checkpoint.py --checkpoint runs/a/checkpoints --output relaid parallel=tp2_pp2_ep4
  python tools/shard_checkpoint.py --checkpoint imported --output relaid parallel.pp=8 parallel.ep=64 parallel.dp=64
  python tools/shard_checkpoint.py --safetensors Kimi-K3 --output Kimi-K3-4gb --shard-gb 4

Any layout reads any checkpoint without this; re-laid, it reads fewer bytes. Other arguments are Hydra overrides: the
layout, and the model where the checkpoint does not say which it is.
"""


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", help="one of ours: …/step_00000200, a run's checkpoints (the newest), or s3://…")
    what.add_argument("--safetensors", metavar="DIR", help="a release's folder")
    parser.add_argument("--output", required=True, metavar="PATH", help="a place of checkpoints, local or s3://; with --safetensors a new folder")
    parser.add_argument("--part-mib", type=float, default=64.0, metavar="MIB", help="largest part of a tensor of ours (default 64); small parts suit ZeRO fragments of optimizer state")
    parser.add_argument("--shard-gb", type=float, default=16.0, metavar="GB", help="size of a safetensors file (default 16)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2); does not change the result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(argv)


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from megamoe.utils.errors import check
    from megamoe.utils.progress import Bars

    check(args.workers >= 1, "--workers", args.workers, "must be 1 or more")
    check(args.part_mib > 0, "--part-mib", args.part_mib, "must be above 0")
    check(args.shard_gb > 0, "--shard-gb", args.shard_gb, "must be above 0")
    with Bars("cutting") as bars:
        if args.safetensors:
            check(not overrides, "overrides", " ".join(overrides), "mean nothing for a folder of safetensors; layouts are for --checkpoint")
            from megamoe.checkpoint.offline.resize import resize

            return resize(args.safetensors, args.output, shard_bytes=int(args.shard_gb * 1e9), workers=args.workers, on_total=bars.start)
        from launch.schema import compose
        from megamoe.checkpoint.hf.exporting import saved_model
        from megamoe.checkpoint.offline.relay import relay
        from megamoe.checkpoint.reader import open_checkpoint

        config = compose(overrides)
        named = any(o.startswith("model") for o in overrides)
        model = config.model if named else saved_model(open_checkpoint(args.checkpoint))
        check(model is not None, "checkpoint", args.checkpoint, "does not say which model it is; name it, such as model=k3_2p8t")
        return relay(args.checkpoint, args.output, model, config.parallel, part_bytes=int(args.part_mib * 2**20), workers=args.workers, seq_len=config.train.seq_len, on_total=bars.start)


def show(result: dict) -> str:
    end = f"{result['bytes'] / 1e9:.2f} GB in {result['seconds']:.1f} s ({result['mb_per_s']:.0f} MB/s), {result['peak_memory_bytes_above_start'] / 2**20:,.0f} MiB peak above start in {result['workers']} process{'es' * (result['workers'] > 1)}"
    if "cells" not in result:
        return f"{result['output']}: {result['tensors']:,} tensors from {result['files_before']} files into {result['files']}, {end}"
    return (
        f"{result['output']}: {result['tensors']:,} tensors for {result['cells']} kinds of ranks in {result['files']} files, {result['parts']:,} parts; "
        f"reading takes {result['read_amplification_after']:.2f} bytes per byte held, {result['read_amplification_before']:.2f} before; {end}"
    )


if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
