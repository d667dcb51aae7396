#!/usr/bin/env python3
"""Look into a checkpoint, ours or a release's folder: tree with sizes and dtypes, state, and on request norms, routing
biases, and what differs from another one's configuration. Tensors that differ only in their layer stand in one line.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

EXAMPLE = """\
example:
  python tools/inspect_checkpoint.py runs/default/checkpoints
  python tools/inspect_checkpoint.py runs/default/checkpoints --norms --only model/model.layers.3. --bias
  python tools/inspect_checkpoint.py runs/a/checkpoints --config-diff runs/b/checkpoints
"""
BIAS = ".gate.e_score_correction_bias"


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="…/step_00000200, a run's checkpoints (the newest), s3://…, or a folder with *.safetensors")
    parser.add_argument("--only", default="", metavar="PREFIX", help="names that start so")
    parser.add_argument("--each", action="store_true", help="a line for every tensor instead of one for all layers")
    parser.add_argument("--norms", action="store_true", help="read the tensors: root mean square and largest magnitude of each line")
    parser.add_argument("--bias", action="store_true", help="the routers' selection biases: range and spread of each layer")
    parser.add_argument("--config-diff", metavar="OTHER", help="keys of the saved configuration that differ from another checkpoint's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv), []


def pattern(name: str) -> str:
    """A name with layer, block and expert numbers left out."""
    return re.sub(r"(layers|blocks|experts)\.\d+\.", r"\1.*.", name)


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from megamoe.checkpoint.offline.opened import Opened
    from megamoe.utils.errors import check, nearest
    from megamoe.utils.progress import Bars
    from megamoe.utils.workers import memory_bytes

    before = memory_bytes("VmRSS")
    opened = Opened(args.checkpoint)
    names = [n for n in opened.specs if n.startswith(args.only)]
    tops = {n.split("/")[0] + "/" if "/" in n else n.split(".")[0] + "." for n in opened.specs}
    check(bool(names), "--only", args.only, f"no tensor starts so{nearest(args.only, tops)}")
    lines: dict[tuple, dict] = {}
    with Bars("reading") as bars:
        on_bytes = bars.start(sum(map(opened.num_bytes, names))) if args.norms else None
        for name in names:
            dtype, shape = opened.specs[name]
            key = (name if args.each else pattern(name), dtype, shape)
            line = lines.setdefault(key, {"name": key[0], "dtype": dtype, "shape": list(shape), "count": 0, "bytes": 0})
            line["count"] += 1
            line["bytes"] += opened.num_bytes(name)
            if args.norms:
                add_norms(line, opened.rows(name), on_bytes)
    for line in lines.values():
        if args.norms:
            line["rms"] = (line.pop("_square") / max(line.pop("_elements"), 1)) ** 0.5
    result = {"checkpoint": opened.location, "kind": opened.kind, "tensors": len(names), "bytes": sum(line["bytes"] for line in lines.values()), "lines": list(lines.values())}
    c = opened.checkpoint
    if c is not None:
        result |= {"checkpoint": c.location, "step": c.step, "metrics": c.commit.get("metrics", {}), "files": len(c.manifest.files), "parts": sum(len(e.parts) for e in c.manifest.tensors.values())}
        result["state"] = {k: v for k, v in c.state.items() if k not in ("config", "hf")}
    if args.bias:
        result["bias"] = {n: bias_facts(torch_cat(opened.rows(n))) for n in opened.specs if n.endswith(BIAS)}
    if args.config_diff:
        other = Opened(args.config_diff)
        result["config_diff"] = config_diff(config_of(opened), config_of(other))
    result["peak_memory_bytes_above_start"] = max(memory_bytes("VmHWM") - before, 0)
    return result


def add_norms(line: dict, rows, on_bytes) -> None:
    for x in rows:
        on_bytes(x.numel() * x.element_size())
        # fp32 squares of a slab, added up in double: enough for looking, and four times as fast.
        values = x.float()
        line["_square"] = line.get("_square", 0.0) + float(values.square().sum())
        line["_elements"] = line.get("_elements", 0) + x.numel()
        largest = float(values.abs().max()) if x.numel() else 0.0
        line["largest"] = largest if math.isnan(largest) else max(line.get("largest", 0.0), largest)


def torch_cat(rows):
    import torch

    return torch.cat(list(rows)).double()


def bias_facts(bias) -> dict:
    return {"min": float(bias.min()), "max": float(bias.max()), "mean": float(bias.mean()), "std": float(bias.std(correction=0))}


def config_of(opened) -> dict:
    """Flat {dotted key: value} of what a checkpoint says about its run; of a release, its config.json."""
    if opened.checkpoint is not None:
        tree = opened.checkpoint.state.get("config") or {}
    else:
        path = opened.folder.folder / "config.json"
        tree = json.loads(path.read_text()) if path.is_file() else {}
    flat: dict = {}

    def walk(value, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            flat[key] = value

    walk(tree, "")
    return flat


def config_diff(a: dict, b: dict) -> list[list]:
    absent = "(absent)"
    return [[key, a.get(key, absent), b.get(key, absent)] for key in sorted(a.keys() | b.keys()) if a.get(key, absent) != b.get(key, absent)]


def show(result: dict) -> str:
    out = []
    width = max(len(line["name"]) for line in result["lines"])
    for line in result["lines"]:
        norms = f"  rms {line['rms']:<9.3g} largest {line['largest']:<9.3g}" if "rms" in line else ""
        out.append(f"{line['name']:<{width}}  {line['dtype']:<5} {str(line['shape']):<22} × {line['count']:<6,} {line['bytes'] / 1e6:>12,.2f} MB{norms}".rstrip())
    for name, b in result.get("bias", {}).items():
        out.append(f"bias {name}: {b['min']:.4g} … {b['max']:.4g}, mean {b['mean']:.3g}, spread {b['std']:.3g}")
    for key, a, b in result.get("config_diff", []):
        out.append(f"config {key}: {a} | {b}")
    if "config_diff" in result and not result["config_diff"]:
        out.append("config: no difference")
    for key, value in result.get("state", {}).items():
        out.append(f"state {key}: {json.dumps(value)[:160]}")
    step = f"step {result['step']}, {result['files']:,} files, {result['parts']:,} parts, " if "step" in result else ""
    out.append(f"{result['checkpoint']}: {step}{result['tensors']:,} tensors, {result['bytes'] / 1e9:.3f} GB; {result['peak_memory_bytes_above_start'] / 2**20:,.0f} MiB peak above start")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
