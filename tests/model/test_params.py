"""Every parameter knows its place: names, optimizer blocks, initial values and counts do not depend on the layout.

Why it matters: reduction, Muon, checkpoints and conversion read these records and nothing else; two layouts whose
models start from different values can never be compared. Not covered: the records after a parameter has been cut
(tests/parallel).
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launch.schema import compose
from megamoe.layers.moe import MoE
from megamoe.model.config import AttnResKind, GateKind, ModelConfig
from megamoe.model.init import init_parameters
from megamoe.model.params import ADAMW, MUON, annotate
from megamoe.model.transformer import Transformer
from megamoe.testing.models import toy_config

ROOT = Path(__file__).resolve().parents[2]

# The release's tensors of one layer of each kind and of the rest, its prefix left off. Experts are stacked here.
COMMON = ["input_layernorm.weight", "post_attention_layernorm.weight"] + [f"{p}_{x}.weight" for p in ("self_attention_res", "mlp_res") for x in ("norm", "proj")]
KDA = [f"self_attn.{x}" for x in ("A_log", "dt_bias", "o_norm.weight")] + [
    f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "f_a_proj", "f_b_proj", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d")
]
MLA = [f"self_attn.{x}.weight" for x in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj", "o_proj")]
DENSE = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
MOE = [f"block_sparse_moe.{x}" for x in ("gate.weight", "experts.w1", "experts.w2", "experts.w3", "routed_expert_norm.weight")] + [
    f"block_sparse_moe.{x}.weight"
    for x in ("routed_expert_down_proj", "routed_expert_up_proj", "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
]
REST = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight"]


def meta(config, **kwargs):
    with torch.device("meta"):
        return Transformer(config, **kwargs)


def test_names_are_the_released_ones():
    config = ModelConfig()
    expected = set(REST)
    for n in range(config.num_layers):
        names = COMMON + (MLA if config.is_full_attn(n) else KDA) + (MOE if config.is_moe(n) else DENSE)
        expected |= {f"model.layers.{n}.{name}" for name in names}
    names = [p.megamoe.name for p in meta(config).parameters()]
    assert set(names) == expected and len(names) == len(set(names))
    assert [n for n, _ in meta(config).named_buffers() if n.endswith("bias")] == [f"layers.{n}.block_sparse_moe.gate.e_score_correction_bias" for n in range(1, 9)]


def test_muon_takes_matrices_between_hidden_spaces_and_nothing_else():
    model = meta(ModelConfig())
    adamw = [p.megamoe.name for p in model.parameters() if p.megamoe.optimizer == ADAMW]
    allowed = r"embed_tokens|lm_head|norm\.weight|_res_proj|A_log|dt_bias|conv1d|gate\.weight|layernorm"
    assert all(re.search(allowed, name) for name in adamw)
    muon = [p for p in model.parameters() if p.megamoe.optimizer == MUON]
    assert not [p.megamoe.name for p in muon if re.search(allowed, p.megamoe.name)]
    assert all(p.megamoe.weight_decay and p.dim() in (2, 3) for p in muon)
    assert {p.megamoe.name for p in model.parameters() if p.megamoe.weight_decay and p.megamoe.optimizer == ADAMW} == {
        "model.embed_tokens.weight", "lm_head.weight", *[f"model.layers.{n}.block_sparse_moe.gate.weight" for n in range(1, 9)]
    }  # fmt: skip


def test_muon_blocks_are_heads():
    """K3's own: 128-row blocks of KDA's q, k, v and of kv_b's keys and values, 192-row blocks of q_b; others whole."""
    config = ModelConfig(d_model=64, num_layers=4, full_attn_layers=[4])
    config.kda.num_heads, config.kda.head_dim = 3, 128
    mla = config.mla
    mla.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, mla.q_lora_rank, mla.kv_lora_rank = 3, 128, 64, 128, 48, 32
    views = {p.megamoe.name.removeprefix("model.layers."): p.megamoe.muon_view(p) for p in meta(config).parameters() if p.megamoe.optimizer == MUON}
    assert views["0.self_attn.q_proj.weight"] == views["0.self_attn.v_proj.weight"] == (3, 128, 64)
    assert views["3.self_attn.q_b_proj.weight"] == (3, 192, 48)
    assert views["3.self_attn.kv_b_proj.weight"] == (6, 128, 32)
    assert views["0.self_attn.o_proj.weight"] == (1, 64, 384) and views["0.self_attn.g_proj.weight"] == (1, 384, 64)
    assert views["1.block_sparse_moe.experts.w2"] == (16, 64, 64)
    split = {n: p.megamoe.muon_blocks for n, p in meta(config).named_parameters() if p.megamoe.muon_blocks}
    assert all(blocks[0] == "heads" for blocks in split.values()) and len(split) == 3 * 3 + 2


def test_initial_values_follow_the_recipe():
    config = ModelConfig(init_std=0.02)
    model = Transformer(config)
    with torch.no_grad():
        for p in [*model.parameters(), *model.buffers()]:
            p.fill_(float("nan") if p.is_floating_point() else -7)
    init_parameters(model, config, seed=0)
    p = {x.megamoe.name: x.detach() for x in model.parameters()}
    assert all(x.isfinite().all() for x in p.values()) and not any(b.any() for b in model.buffers())
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.layers.1.block_sparse_moe.experts.w2", "lm_head.weight"):
        assert p[name].std().item() == pytest.approx(0.02, rel=0.05) and abs(p[name].mean().item()) < 1e-3
    assert not any(x.any() for n, x in p.items() if n.endswith("_res_proj.weight")), "queries start at zero"
    assert all((x == 1).all() for n, x in p.items() if n.endswith("norm.weight"))
    assert not p["model.layers.0.self_attn.A_log"].any()
    dt = torch.nn.functional.softplus(torch.cat([x for n, x in p.items() if n.endswith("dt_bias")]))
    assert 9e-4 < dt.min() < 2e-3 and 0.06 < dt.max() < 0.11 and abs(dt.log().mean() - math.log(1e-2)) < 0.2
    assert p["model.layers.0.self_attn.q_conv1d.weight"].abs().max() <= 0.5
    assert p["model.layers.1.block_sparse_moe.gate.weight"].abs().max() <= 128**-0.5
    config.kda.gate = GateKind.softplus
    init_parameters(model, config, seed=0)
    rates = torch.cat([x for n, x in p.items() if n.endswith("A_log")]).exp()
    assert rates.min() >= 1 and 8 < rates.max() <= 16


def test_initial_values_do_not_depend_on_the_layout():
    """A stage, two of six experts, half the rows of a matrix, another dtype: always the whole model's values."""
    config = toy_config(mtp__num_layers=1)
    whole = Transformer(config)
    init_parameters(whole, config, seed=5)
    expected = {p.megamoe.name: p.detach() for p in whole.parameters()}
    part = Transformer(config, layers=range(2, 4), embed=False, head=False)
    init_parameters(part, config, seed=5)
    assert len(list(part.parameters())) > 10
    for p in part.parameters():
        assert torch.equal(p, expected[p.megamoe.name])

    layer = part.layers["3"]
    layer.block_sparse_moe = MoE(config.d_model, config.norm_eps, config.moe, config.ffn, first_expert=2, num_local=2)
    annotate(part)
    assert layer.block_sparse_moe.experts.w1.megamoe.expert_ids == (2, 3)
    weight = layer.self_attn.q_proj.weight
    layer.self_attn.q_proj.weight = torch.nn.Parameter(weight[8:].clone())
    layer.self_attn.q_proj.weight.megamoe = replace(weight.megamoe, offset=(8, 0))
    part.double()
    init_parameters(part, config, seed=5)
    assert torch.equal(layer.block_sparse_moe.experts.w1, expected["model.layers.3.block_sparse_moe.experts.w1"][2:4].double())
    assert torch.equal(layer.self_attn.q_proj.weight, expected["model.layers.3.self_attn.q_proj.weight"][8:].double())

    other = Transformer(config)
    init_parameters(other, config, seed=6)
    assert not torch.equal(other.embed_tokens.weight, whole.embed_tokens.weight)
    assert not torch.equal(whole.layers["0"].self_attn.k_proj.weight, whole.layers["1"].self_attn.k_proj.weight)


@pytest.mark.parametrize("changes", [dict(tie_embeddings=True), dict(attn_res=AttnResKind.off), dict(mtp__num_layers=1)])
def test_every_switch_leaves_every_parameter_described(changes):
    model = meta(toy_config(**changes))
    assert all(p.megamoe.global_shape == tuple(p.shape) for p in model.parameters())
    assert hasattr(model, "lm_head") != changes.get("tie_embeddings", False)


# Published or prescribed counts: with the router bias buffers; k3_2p8t also without, and its activated parameters.
COUNTS = {"k3_0p4b": 398_876_744, "k3_1p7b": 1_701_398_416, "k3_24b": 24_162_422_736, "k3_2p8t": 2_779_484_476_000}


@pytest.mark.parametrize("name", COUNTS)
def test_plan_counts_parameters_on_the_built_model(name):
    spec = importlib.util.spec_from_file_location("plan", ROOT / "tools" / "plan.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    plan = tool.plan_model(compose([f"model={name}"]).model, seq_len=8192)
    assert plan["parameters"] == COUNTS[name]
    assert sum(plan["parameters_by_kind"].values()) == plan["parameters_without_bias_buffers"]
    assert plan["name"] in tool.table(plan)


def test_plan_of_the_release_as_a_command():
    command = [sys.executable, "tools/plan.py", "model=k3_2p8t", "--json", "stage=pretrain_8k"]
    plan = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert plan["parameters"] == 2_779_484_476_000
    assert plan["bias_buffers"] == 82_432 and plan["parameters_without_bias_buffers"] == 2_779_484_393_568
    assert round(plan["activated"] / 1e9, 3) == 104.190
    assert plan["layers"] == {"kda": 69, "mla": 24, "moe": 92} and plan["attn_res_rows"] == 8
    flops = {kind: round(n / 1e12, 3) for kind, n in plan["train_flops_per_token"].items()}
    assert (flops["matrices"], flops["kda_core"], flops["mla_core"]) == (0.625, 0.004, 0.018)
    assert plan["kda_state_bytes_per_sequence"] == 414 * 2**20 and plan["mla_cache_bytes_per_token"] == 27_648
    refused = subprocess.run([sys.executable, "tools/plan.py", "model=k3_3t"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "k3_2p8t" in refused.stderr
