#!/usr/bin/env python3
"""Convert between a released checkpoint (Hugging Face safetensors of Kimi-K3 or Kimi-Linear) and ours, both ways.

Headers are compared with the configuration before any data is read. Streams in several processes; memory does not grow
with the model. What training does not need (vision, codes of MXFP4 experts) is kept under hf/ and given back on export.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

EXAMPLE = """\
example:
  python tools/convert_checkpoint.py --from-hf Kimi-K3 --output imported --workers 8
  python tools/convert_checkpoint.py --to-hf runs/sft/checkpoints --base imported --output Kimi-K3-tuned
  python tools/convert_checkpoint.py --list-names model=k3_2p8t

Other arguments are Hydra overrides, such as model=kimi_linear_48b: needed where config.json or the checkpoint does not say
which model it is, compared with them where they do.
"""


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from-hf", metavar="DIR", help="release to import")
    what.add_argument("--to-hf", metavar="CHECKPOINT", help="checkpoint of ours to export: …/step_00000200, a run's checkpoints (the newest), or s3://…")
    what.add_argument("--list-names", action="store_true", help="print name, dtype and shape of every tensor of the model's release, from the configuration alone")
    parser.add_argument("--output", metavar="PATH", help="import: place of checkpoints, local or s3://; export: a new folder")
    parser.add_argument("--base", metavar="CHECKPOINT", help="export: the imported checkpoint that has vision, config.json and the codes of unchanged experts")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="import: step number of the checkpoint (default 0)")
    parser.add_argument("--no-carry", action="store_true", help="import: leave out codes and scales of MXFP4 experts; a quarter smaller, exports encode all experts anew")
    parser.add_argument("--experts", choices=("auto", "mxfp4", "bf16"), default="auto", help="export and names: form of routed experts (default: as the source had them)")
    parser.add_argument("--keep-dtype", action="store_true", help="export: the checkpoint's dtypes instead of the release's bf16 and fp32")
    parser.add_argument("--shard-gb", type=float, default=16.0, metavar="GB", help="export: size of a safetensors file (default 16)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2); does not change the result")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(argv)


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from megamoe.utils.errors import check

    check(args.workers >= 1, "--workers", args.workers, "must be 1 or more")
    check(args.shard_gb > 0, "--shard-gb", args.shard_gb, "must be above 0")
    check(args.step >= 0, "--step", args.step, "must be 0 or more")
    check(args.list_names or bool(args.output), "--output", args.output, "is needed: where does the result go?")
    from launch.schema import compose

    given = any(o.startswith("model") for o in overrides)
    config = compose(overrides).model
    if args.list_names:
        return list_names(config, args.experts)
    from megamoe.utils.progress import Bars

    with Bars("converting") as bars:
        if args.from_hf:
            from megamoe.checkpoint.hf.importing import import_release

            return import_release(args.from_hf, args.output, config, given=given, step=args.step, workers=args.workers, carry=not args.no_carry, on_total=bars.start)
        from megamoe.checkpoint.hf.exporting import export_release

        return export_release(
            args.to_hf, args.output, base=args.base, config=config if given else None, experts=args.experts, keep_dtype=args.keep_dtype,
            shard_bytes=int(args.shard_gb * 1e9), workers=args.workers, on_total=bars.start,
        )  # fmt: skip


def list_names(config, experts: str) -> dict:
    from dataclasses import replace

    from megamoe.checkpoint.hf.names import Names, release_of
    from megamoe.utils.errors import UserError

    release = release_of(config)
    if experts != "auto":
        release = replace(release, mxfp4=experts == "mxfp4")
    try:
        return {"tensors": [[s.name, s.dtype, list(s.shape)] for s in Names(config, release).stored()]}
    except ValueError as error:
        raise UserError(f"--experts={experts}: {error}") from None


def show(result: dict) -> str:
    if "tensors" in result and isinstance(result["tensors"], list):
        return "\n".join(f"{name} {dtype} {shape}" for name, dtype, shape in result["tensors"])
    peak = f"{result['peak_memory_bytes_above_start'] / 2**20:,.0f} MiB peak above start in {result['workers']} process{'es' * (result['workers'] > 1)}"
    if "source_bytes" in result:
        return (f"{result['output']}: {result['released_tensors']:,} tensors of {result['release']}, {result['source_bytes'] / 1e9:.2f} GB read, {result['written_bytes'] / 1e9:.2f} GB written "
                f"in {result['seconds']:.1f} s ({result['source_mb_per_s']:.0f} and {result['written_mb_per_s']:.0f} MB/s), {peak}")  # fmt: skip
    left = f"\nleft out, releases do not have them: {', '.join(result['left_out'][:5])}{' …' * (len(result['left_out']) > 5)}" if result["left_out"] else ""
    return (f"{result['output']}: {result['tensors']:,} tensors in {result['files']} file{'s' * (result['files'] > 1)}, {result['bytes'] / 1e9:.2f} GB in {result['seconds']:.1f} s ({result['mb_per_s']:.0f} MB/s), "
            f"{result['groups_encoded_anew']:,} MXFP4 groups encoded anew, {peak}{left}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
