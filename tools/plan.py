#!/usr/bin/env python3
"""Count a model without allocating it: parameters by kind, what a token activates, FLOPs per token, state sizes.

    python tools/plan.py model=k3_2p8t --json

Takes the same Hydra overrides as the trainer. The model is built on the meta device, so the numbers are those of the
modules that train, not of a formula beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Other arguments are Hydra overrides, such as model=k3_1p7b.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args, overrides = parser.parse_known_args(argv)
    # After the arguments: --help should not wait for these.
    from launch.schema import compose
    from megamoe.utils.errors import UserError

    try:
        config = compose(overrides)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    plan = plan_model(config.model, config.train.seq_len)
    print(json.dumps(plan) if args.json else table(plan))
    return 0


def plan_model(config, seq_len: int) -> dict:
    """Numbers of one model configuration. Keys ending in _bytes are bytes, the rest are counts."""
    import torch

    from megamoe.model.flops import count_parameters, flops_per_token
    from megamoe.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    counts = count_parameters(model, config)
    flops = flops_per_token(config, counts, (seq_len + 1) / 2)
    kinds: dict[str, int] = {}
    for p in model.parameters():
        kind = kind_of(p.megamoe.name)
        kinds[kind] = kinds.get(kind, 0) + p.numel()
    full = sum(config.is_full_attn(n) for n in range(config.num_layers))
    kda_layers = config.num_layers - full
    return {
        "name": config.name,
        "parameters": counts.total,
        "parameters_without_bias_buffers": counts.without_bias,
        "bias_buffers": counts.bias_buffers,
        "activated": counts.activated,
        "routed_experts": counts.routed,
        "parameters_by_kind": kinds,
        "layers": {"kda": kda_layers, "mla": full, "moe": sum(config.is_moe(n) for n in range(config.num_layers))},
        "attn_res_rows": config.bank_rows_before(config.num_layers),
        "seq_len": seq_len,
        "train_flops_per_token": {"matrices": flops.matrices, "kda_core": flops.kda_core, "mla_core": flops.mla_core, "total": flops.total},
        "kda_state_bytes_per_sequence": kda_layers * config.kda.num_heads * config.kda.head_dim**2 * 4,
        "mla_cache_bytes_per_token": full * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * 2,
        "histogram_bytes": 4 * sum(b.numel() for name, b in model.named_buffers() if name.endswith("histogram_EB")),
    }


def kind_of(name: str) -> str:
    """The row of the table that a parameter belongs to, from its logical name."""
    for kind, marks in (
        ("mtp", ("model.mtp.",)),
        ("routed experts", (".experts.",)),
        ("shared experts", (".shared_experts.",)),
        ("latent projections", (".routed_expert_",)),
        ("router", (".gate.weight",)),
        ("attention", (".self_attn.",)),
        ("dense MLP", (".mlp.",)),
        ("AttnRes", ("_res_norm.", "_res_proj.")),
        ("embedding", ("embed_tokens.",)),
        ("head", ("lm_head.",)),
    ):
        if any(mark in name for mark in marks):
            return kind
    return "norms"


def table(plan: dict) -> str:
    """The same numbers for a person."""
    rows = [(kind, f"{n:,}") for kind, n in plan["parameters_by_kind"].items()]
    rows += [
        ("router bias buffers", f"{plan['bias_buffers']:,}"),
        ("total", f"{plan['parameters']:,}"),
        ("activated per token (head counted, embedding not)", f"{plan['activated']:,}"),
        ("layers", ", ".join(f"{n} {kind}" for kind, n in plan["layers"].items())),
        (f"training FLOPs per token at {plan['seq_len']:,} tokens", f"{plan['train_flops_per_token']['total']:.4g}"),
        ("KDA state per sequence", f"{plan['kda_state_bytes_per_sequence'] / 2**20:.1f} MiB"),
        ("MLA cache per token", f"{plan['mla_cache_bytes_per_token']:,} B"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join([plan["name"], *(f"  {label:<{width}}  {value:>20}" for label, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
