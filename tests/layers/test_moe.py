"""The MoE layer is its equations, and padding is invisible to it.

Why it matters: late weights, the latent norm's place and the scaling factor are choices of this family that other MoE
layers make differently. Not covered: dispatch and experts alone (tests/ops/test_moe_ops.py), balancing
(test_balance.py).
"""

from __future__ import annotations

import pytest
import torch

from megamoe.layers.config import Balancing, FFNConfig, MoEConfig
from megamoe.layers.moe import MoE
from megamoe.ops.situ_glu import gated_activation

D = 16


def layer(**changes):
    config = MoEConfig(num_experts=6, top_k=2, expert_size=10, latent=8, num_shared_experts=2, routed_scaling_factor=1.7)
    for name, value in changes.items():
        setattr(config, name, value)
    moe = MoE(D, 1e-5, config, FFNConfig()).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.5)
        moe.gate.e_score_correction_bias.normal_(0, 0.3)
    return moe


def mlp(x, gate, up, down):
    return gated_activation(x @ gate.T, x @ up.T, act="situ") @ down.T


@pytest.mark.parametrize("latent,norm,shared,balancing", [(8, True, 2, "quantile"), (8, False, 2, "sign"), (None, True, 0, "none"), (8, True, 1, "threshold")])
def test_layer_is_its_equations(latent, norm, shared, balancing):
    moe = layer(latent=latent, latent_norm=norm, num_shared_experts=shared, balancing=Balancing[balancing])
    x = torch.randn(30, D, dtype=torch.float64, requires_grad=True)
    logits = x @ moe.gate.weight.T
    score = torch.sigmoid(logits)
    choice = ((logits if balancing == "threshold" else score) + moe.gate.e_score_correction_bias).topk(2, -1).indices
    p = torch.zeros_like(score).scatter(1, choice, score.gather(1, choice))
    p = p / p.sum(-1, keepdim=True) * 1.7
    z = x if latent is None else x @ moe.routed_expert_down_proj.weight.T
    experts = moe.experts
    u = sum(p[:, e, None] * mlp(z, experts.w1[e], experts.w3[e], experts.w2[e]) for e in range(6))
    if latent is not None:
        if norm:
            u = u * (u.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * moe.routed_expert_norm.weight
        u = u @ moe.routed_expert_up_proj.weight.T
    if shared:
        s = moe.shared_experts
        assert s.gate_proj.weight.shape == (10 * shared, D)
        u = u + mlp(x, s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight)
    got, stats = moe(x)
    torch.testing.assert_close(got, u, atol=1e-12, rtol=1e-10)
    assert torch.equal(stats.count_E, torch.bincount(choice.flatten(), minlength=6))
    upstream = torch.randn_like(u)
    params = [x, *moe.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, params, upstream) for y in (got, u))):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)


def test_padding_reaches_no_expert_and_no_statistic():
    moe = layer()
    x = torch.randn(20, D, dtype=torch.float64)
    mask = torch.ones(20, dtype=torch.bool)
    mask[[3, 11, 19]] = False
    y, stats = moe(x, mask)
    alone, alone_stats = moe(x[mask])
    torch.testing.assert_close(y[mask], alone, atol=1e-13, rtol=0)
    for a, b in zip(stats, alone_stats):
        assert (a is None and b is None) or torch.equal(a, b)
    assert stats.count_E.sum() == 17 * 2 and stats.histogram_EB.sum() == 17 * 6
    idx, _, _ = moe.gate(x, mask)
    assert (idx[~mask] == -1).all() and (idx[mask] >= 0).all()


def test_no_token_at_all():
    moe = layer()
    y, stats = moe(torch.zeros(0, D, dtype=torch.float64))
    y.sum().backward()
    assert y.shape == (0, D) and stats.count_E.sum() == 0
    assert all(p.grad is not None and not p.grad.any() for p in moe.parameters())


def test_router_scores_are_float32_for_bfloat16_inputs():
    """Two experts whose scores differ by less than a bf16 step are still told apart."""
    moe = layer(top_k=1, balancing=Balancing.none).float()
    with torch.no_grad():
        moe.gate.e_score_correction_bias.zero_()
        moe.gate.weight.zero_()
        moe.gate.weight[2, 0], moe.gate.weight[4, 0] = 1.0, 1.0
        moe.gate.weight[4, 1] = 2**-9
    moe.bfloat16()
    x = torch.zeros(3, D).bfloat16()
    x[:, 0], x[:, 1] = 1.0, torch.tensor([1.0, -1.0, 1.0]).bfloat16()
    assert moe.gate(x)[0].flatten().tolist() == [4, 2, 4]
    assert moe.gate(x)[1].dtype == torch.float32 and moe.gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.gpu
def test_shared_experts_on_a_second_stream_change_no_bit():
    """A block that is used again too early, or a sum that does not wait, shows as a changed bit now and then: many rounds, little memory."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    torch.manual_seed(0)
    config = MoEConfig(num_experts=16, top_k=4, expert_size=256, latent=256, num_shared_experts=2)
    moe = MoE(512, 1e-5, config, FFNConfig()).cuda().bfloat16()
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.05)
    xs = [torch.randn(1024, 512, device="cuda").bfloat16() for _ in range(3)]

    def step(x):
        x = (x * 1).requires_grad_()  # freed at the end, for the next call to take
        y, _ = moe(x * 1)
        return [y.detach(), *torch.autograd.grad(y, [x, *moe.parameters()], torch.ones_like(y))]

    want = [step(x) for x in xs]
    config.shared_stream = True
    for _ in range(20):
        for x, w in zip(xs, want):
            assert all(torch.equal(a, b) for a, b in zip(step(x), w))
    assert moe._side is not None
