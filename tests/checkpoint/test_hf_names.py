"""The names of a release follow from the configuration: K3's 497,220 tensors, counted and spelled as released.

Why: one missing pattern leaves a tensor of 2.8 T parameters at its random start without a word. The literals here come
from the released index's description, not from the table under test; the table's shapes are also compared with the
model's own, tensor by tensor. Not covered: the released files themselves (1.56 TB, not at hand).
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from launch.schema import compose
from megamoe.checkpoint.format import DTYPES
from megamoe.checkpoint.hf.config import differences, read_config, write_config
from megamoe.checkpoint.hf.names import Names, release_of
from megamoe.model.params import logical_name
from megamoe.model.transformer import Transformer
from tools import convert_checkpoint

L = "language_model.model.layers."
# (tensor, dtype, shape), one of each kind.
K3 = [
    ("language_model.model.embed_tokens.weight", "BF16", (163840, 7168)),
    ("language_model.lm_head.weight", "BF16", (163840, 7168)),
    ("language_model.model.norm.weight", "BF16", (7168,)),
    ("language_model.model.output_attn_res_proj.weight", "BF16", (1, 7168)),
    (L + "0.self_attention_res_proj.weight", "BF16", (1, 7168)),
    (L + "0.mlp.gate_proj.weight", "BF16", (33792, 7168)),
    (L + "0.self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
    (L + "0.self_attn.A_log", "F32", (128,)),
    (L + "0.self_attn.dt_bias", "F32", (12288,)),
    (L + "0.self_attn.o_norm.weight", "F32", (128,)),
    (L + "0.self_attn.f_b_proj.weight", "BF16", (12288, 128)),
    (L + "90.self_attn.b_proj.weight", "BF16", (96, 7168)),
    (L + "91.self_attn.q_b_proj.weight", "BF16", (18432, 1536)),
    (L + "92.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
    (L + "92.self_attn.kv_b_proj.weight", "BF16", (24576, 512)),
    (L + "3.self_attn.g_proj.weight", "BF16", (12288, 7168)),
    (L + "1.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
    (L + "92.block_sparse_moe.routed_expert_up_proj.weight", "BF16", (7168, 3584)),
    (L + "92.block_sparse_moe.shared_experts.down_proj.weight", "BF16", (7168, 6144)),
    (L + "92.block_sparse_moe.experts.895.w1.weight_packed", "U8", (3072, 1792)),
    (L + "1.block_sparse_moe.experts.0.w3.weight_scale", "U8", (3072, 112)),
    (L + "1.block_sparse_moe.experts.0.w2.weight_packed", "U8", (3584, 1536)),
    (L + "1.block_sparse_moe.experts.0.w2.weight_scale", "U8", (3584, 96)),
    ("vision_tower.encoder.blocks.26.wqkv.weight", "BF16", (4608, 1024)),
    ("vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, 1024)),
    ("mm_projector.proj.2.weight", "BF16", (7168, 4096)),
]


def stored(model: str):
    config = compose([f"model={model}"]).model
    return config, list(Names(config, release_of(config)).stored())


def test_k3_has_497220_tensors_of_1_5609_terabytes():
    _, all_of_them = stored("k3_2p8t")
    found = {s.name: (s.dtype, s.shape) for s in all_of_them}
    assert len(found) == len(all_of_them) == 497_220
    for name, dtype, shape in K3:
        assert found[name] == (dtype, shape), name
    kinds = Counter(name.split(".")[0] for name in found)
    assert kinds == {"vision_tower": 27 * 6 + 3, "mm_projector": 3, "language_model": 497_052}
    per_layer = Counter(name.split(".")[3] for name in found if name.startswith(L))
    assert (per_layer["0"], per_layer["1"], per_layer["3"]) == (6 + 14 + 3, 6 + 14 + 8 + 896 * 6, 6 + 8 + 8 + 896 * 6)
    assert round(sum(DTYPES[s.dtype].itemsize * math.prod(s.shape) for s in all_of_them) / 1e12, 4) == 1.5609
    # One contiguous read gets an expert: its six tensors are neighbours, of 17,547,264 bytes.
    at = [i for i, s in enumerate(all_of_them) if s.name.startswith(L + "5.block_sparse_moe.experts.7.")]
    assert at == list(range(at[0], at[0] + 6)) and sum(math.prod(all_of_them[i].shape) for i in at) == 17_547_264


def test_the_tool_prints_a_line_a_name(capsys):
    args, overrides = convert_checkpoint.parse_args(["--list-names", "model=kimi_linear_48b"])
    lines = convert_checkpoint.show(convert_checkpoint.work(args, overrides)).splitlines()
    # 27 layers: 20 KDA of 15, 7 MLA of 5, 2 norms each; 1 dense of 3, 26 MoE of 5 + 256 * 3; embedding, norm, head.
    assert len(lines) == 27 * 2 + 20 * 15 + 7 * 5 + 3 + 26 * (5 + 768) + 3 == 20_493
    assert "model.layers.0.self_attn.A_log F32 [1, 1, 32, 1]" in lines
    assert "model.layers.1.block_sparse_moe.experts.255.w2.weight BF16 [2304, 1024]" in lines


@pytest.mark.parametrize("model", ["k3_2p8t", "kimi_linear_48b", "tiny"])
def test_the_table_describes_the_model_that_trains(model):
    config = compose([f"model={model}"]).model
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    rows = Names(config, release_of(config)).rows
    assert {r.name: r.shape for r in rows if r.form != "passed"} == {logical_name(path): tuple(x.shape) for path, x in state.items()}
    # The fp32 set is what the model keeps wide.
    wide = {r.name.rpartition("self_attn.")[2].rpartition("gate.")[2] for r in rows if r.dtype == "F32"}
    assert wide == {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias"}


@pytest.mark.parametrize("model", ["k3_2p8t", "kimi_linear_48b", "tiny"])
def test_a_written_config_json_reads_back_as_the_same_model(model):
    config = compose([f"model={model}"]).model
    other = compose(["model=k3_0p4b"]).model
    back = read_config(write_config(config, release_of(config)), other, "config.json")
    assert differences(config, back) == [] and differences(config, other) != []
