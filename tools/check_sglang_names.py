#!/usr/bin/env python3
"""Hold our Kimi-K3 names against the loader of an SGLang wheel, by reading its source: nothing of it is imported or run.

    pip download --no-deps sglang==0.5.23 -d wheels
    python tools/check_sglang_names.py wheels/sglang-*.whl model=k3_2p8t

From the loader's syntax tree come its prefix and substring mappings, its fused-projection table and the parameter names
that its modules assign. Each of our names goes through those mappings, as a load would, and every part of what results
must be a name that the sources assign; the strings that the loader looks for must in turn occur in our names.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command import run_command  # noqa: E402

LOADER = "sglang/srt/models/kimi_k3.py"
# Where the loader's modules inherit or take parameters from.
OTHERS = ("sglang/srt/models/kimi_k3_vl.py", "sglang/srt/models/deepseek_v2.py", "sglang/srt/models/kimi_linear.py", "sglang/srt/layers/linear.py", "sglang/srt/layers/layernorm.py",
          "sglang/srt/layers/vocab_parallel_embedding.py", "sglang/srt/layers/quantization/mxfp4.py")  # fmt: skip
# What the loader looks for in names of a K3 release, as its source writes it.
LOOKED_FOR = ("weight_packed", ".q_a_proj.", ".kv_a_proj_with_mqa.", "vision_tower", "mm_projector", "language_model.", "block_sparse_moe", ".weight_scale", ".gate_proj", ".up_proj", ".q_proj", ".k_proj", ".v_proj", ".g_proj", ".q_conv1d", ".k_conv1d", ".v_conv1d")  # fmt: skip


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="sglang-0.5.23-….whl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(argv)


def assigned_names(tree: ast.AST) -> set[str]:
    """Attributes and parameters that classes give themselves: self.x = …, register_parameter("x", …), ModuleList keys are numbers."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("register_parameter", "register_buffer") and node.args and isinstance(node.args[0], ast.Constant):
            found.add(node.args[0].value)
    return found


def literal(tree: ast.AST, keyword: str) -> dict[str, str]:
    """The dict that is passed as `keyword=` in the loader's mapper."""
    return next(ast.literal_eval(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == keyword)


def fused_tables(tree: ast.AST) -> list[tuple[str, str]]:
    """(fused module, released projection) out of the tables of `load_weights`."""
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3 and all(isinstance(e, ast.Constant) for e in node.elts):
            fused, released, _ = (e.value for e in node.elts)
            if isinstance(fused, str) and isinstance(released, str) and fused.startswith(".") and released.startswith("."):
                rows.append((fused, released))
    return rows


def loaded_as(name: str, prefixes: dict[str, str], substrings: dict[str, str], fused: dict[str, str], kda: bool) -> str:
    """Where a released tensor ends up, by the loader's own steps."""
    for old, new in prefixes.items():
        name = new + name[len(old) :] if name.startswith(old) else name
    for old, new in substrings.items():
        name = name.replace(old, new)
    if name.startswith(("vision_tower", "mm_projector")):
        return name
    name = name.replace("language_model.", "").replace("weight_packed", "weight")
    for piece in (".q_a_proj.", ".kv_a_proj_with_mqa."):
        name = name.replace(piece, ".fused_qkv_a_proj_with_mqa.")
    for released, module in fused.items():
        if released in name and (kda or released not in (".q_proj", ".k_proj", ".v_proj", ".g_proj")):
            return name.replace(released, module)
    return re.sub(r"experts\.\d+\.w([123])\.", lambda m: "experts.w2_" if m[1] == "2" else "experts.w13_", name)


def work(args: argparse.Namespace, overrides: list[str]) -> dict:
    from launch.schema import compose
    from megamoe.checkpoint.hf.names import Names, release_of
    from megamoe.utils.errors import UserError

    config = compose(overrides or ["model=k3_2p8t"]).model
    names = [s.name for s in Names(config, release_of(config)).stored()]
    try:
        wheel = zipfile.ZipFile(args.wheel)
        source = wheel.read(LOADER).decode()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"wheel={args.wheel}: cannot be read ({error}); fetch it with pip download --no-deps sglang==0.5.23") from None
    tree = ast.parse(source)
    here = set(wheel.namelist())
    known = assigned_names(tree).union(*(assigned_names(ast.parse(wheel.read(f))) for f in OTHERS if f in here))
    prefixes, substrings = literal(tree, "orig_to_new_prefix"), literal(tree, "orig_to_new_substr")
    rows = fused_tables(tree)
    wanted = (".fused_qkvg_proj", ".qkv_conv1d", ".gate_up_proj")
    fused = {released: module for module, released in rows if module in wanted}
    expert = re.search(r'_EXPERT_WEIGHT_NAME = re\.compile\(r"(.+?)"\)', source)[1]
    # What the modules behind FusedMoE, Sequential and torch's own layers bring.
    known |= {"weight", "bias", "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"}
    faults: dict[str, str] = {}
    for name in names:
        layer = re.search(r"layers\.(\d+)\.", name)
        target = loaded_as(name, prefixes, substrings, fused, kda=layer is not None and not config.is_full_attn(int(layer[1])))
        unknown = [part for part in target.split(".") if not part.isdigit() and part not in known]
        if unknown:
            faults.setdefault(re.sub(r"\.\d+\.", ".*.", target), f"{name} -> {target}: nothing assigns {', '.join(unknown)}")
    joined = "\n".join(names)
    faults |= {text: f"the loader looks for {text!r}, none of our names has it" for text in LOOKED_FOR if text in source and text not in joined}
    faults |= {text: f"the loader's source does not have {text!r} any more; look at it again" for text in LOOKED_FOR if text not in source}
    experts = sum(re.search(expert, name) is not None for name in names)
    return {"names": len(names), "mappings": [*prefixes.items(), *substrings.items(), *fused.items()], "expert_pattern": expert, "expert_tensors": experts, "known": len(known), "faults": list(faults.values())}


def show(result: dict) -> str:
    lines = [f"fault: {fault}" for fault in result["faults"]]
    lines += [f"maps {a} -> {b}" for a, b in result["mappings"]]
    lines.append(f"{result['names']:,} names, {result['expert_tensors']:,} of them match {result['expert_pattern']}, {len(result['faults'])} kinds of names that the loader would not place")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(*parse_args(sys.argv[1:]), work, show))
