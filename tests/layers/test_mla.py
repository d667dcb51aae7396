"""MLA: what each switch does to the attention, and that positions are those of the document.

Why it matters: NoPE, the shared key part and the rotary variants differ only by conventions that a loss curve hides.
The whole layer without gate and rotation is held against transformers in tests/model/test_kimi_linear_parity.py.
Not covered: the attention core's backends (tests/ops/test_small_ops.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.layers.config import MLAConfig, RopeKind
from megamoe.layers.mla import MLA, rope_frequencies, rotate, rotation, softmax_scale
from megamoe.layers.stream import Stream

D = 24


def layer(**changes):
    config = MLAConfig(num_heads=3, q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
    for name, value in changes.items():
        setattr(config, name, value)
    mla = MLA(D, config).double()
    with torch.no_grad():
        for p in mla.parameters():
            p.normal_(0, 0.5)
    return mla


def stream(*lengths, positions=None):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Stream.build(sum(lengths), cu, positions_T=positions)


def rms(x, w, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@pytest.mark.parametrize("q_lora_rank,gate", [(10, True), (None, True), (10, False)])
def test_layer_is_its_equations(q_lora_rank, gate):
    mla, T = layer(q_lora_rank=q_lora_rank, output_gate=gate), 11
    x = torch.randn(T, D, dtype=torch.float64)
    w = {name: p for name, p in mla.named_parameters()}
    q = x @ w["q_proj.weight"].T if q_lora_rank is None else rms(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    q = q.view(T, 3, 10)
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split([12, 4], -1)
    kv = (rms(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).view(T, 3, 14)
    k = torch.cat([kv[..., :6], shared[:, None].expand(T, 3, 4)], -1)
    score = torch.einsum("thq,shq->hts", q, k) * 10**-0.5
    p = score.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    o = torch.einsum("hts,shv->thv", p, kv[..., 6:]).reshape(T, -1)
    if gate:
        o = torch.sigmoid(x @ w["g_proj.weight"].T) * o
    torch.testing.assert_close(mla(x, stream(T)), o @ w["o_proj.weight"].T, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("rope", list(RopeKind))
def test_a_packed_document_is_the_document_alone(rope):
    mla, lengths = layer(rope=rope, rope_factor=4.0, original_max_seq_len=64), (3, 0, 9, 1)
    x = torch.randn(13, D, dtype=torch.float64)
    packed = mla(x, stream(*lengths))
    for document, expected in zip(x.split(lengths), packed.split(lengths)):
        if len(document):
            torch.testing.assert_close(mla(document, stream(len(document))), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rope", [RopeKind.rotary, RopeKind.linear, RopeKind.yarn])
def test_rotation_sees_distances_only(rope):
    """All positions moved by 1000: same output. Moved unevenly: another one."""
    mla, x = layer(rope=rope, rope_factor=4.0, original_max_seq_len=64), torch.randn(8, D, dtype=torch.float64)
    position = torch.arange(8)
    here = mla(x, stream(8, positions=position))
    torch.testing.assert_close(mla(x, stream(8, positions=position + 1000)), here, atol=1e-10, rtol=0)
    assert (mla(x, stream(8, positions=2 * position)) - here).abs().max() > 1e-3


def test_without_rotation_positions_do_nothing():
    mla, x = layer(), torch.randn(8, D, dtype=torch.float64)
    assert torch.equal(mla(x, stream(8)), mla(x, stream(8, positions=torch.arange(8) * 7)))


def test_rotation_turns_interleaved_pairs():
    config = MLAConfig(qk_rope_head_dim=4, rope=RopeKind.rotary, rope_theta=100.0)
    cos, sin = rotation(config, torch.tensor([0, 3]))
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]] * 2, dtype=torch.float64)
    y = rotate(x, cos, sin)
    torch.testing.assert_close(y[0], x[0])
    expected = [math.cos(3), math.sin(3), -math.sin(0.3), math.cos(0.3)]
    torch.testing.assert_close(y[1, 0], torch.tensor(expected, dtype=torch.float64))


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones():
    plain = MLAConfig(qk_rope_head_dim=64, rope=RopeKind.rotary)
    yarn = MLAConfig(qk_rope_head_dim=64, rope=RopeKind.yarn, rope_factor=8.0, original_max_seq_len=4096)
    ratio = rope_frequencies(yarn) / rope_frequencies(plain)
    turns = 4096 * rope_frequencies(plain) / (2 * math.pi)
    assert torch.equal(ratio[turns > 40], torch.ones_like(ratio[turns > 40])) and (turns > 40).any()
    torch.testing.assert_close(ratio[turns < 0.8], torch.full_like(ratio[turns < 0.8], 1 / 8))
    assert (ratio.diff() <= 1e-12).all(), "no pair is stretched more than a slower one"
    linear = MLAConfig(qk_rope_head_dim=64, rope=RopeKind.linear, rope_factor=8.0)
    torch.testing.assert_close(rope_frequencies(linear), rope_frequencies(plain) / 8)
    assert softmax_scale(yarn) / softmax_scale(plain) == pytest.approx((0.1 * math.log(8) + 1) ** 2)
    assert softmax_scale(linear) == softmax_scale(plain)


def test_angles_of_far_positions_are_exact():
    """At a million tokens an fp32 angle would be off by 0.06 rad."""
    config = MLAConfig(qk_rope_head_dim=4, rope=RopeKind.rotary)
    _, sin = rotation(config, torch.tensor([1_048_575]))
    assert sin[0, 0].item() == pytest.approx(math.sin(1_048_575), abs=1e-9)
