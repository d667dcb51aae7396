"""Norms, activations, short convolution, attention core and head loss: hand-written backwards and packed streams.

Why it matters: each of these runs in every layer with a backward of its own, and each convolution or attention must
stop at a document's start. Not covered: GPU backends; speed.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megamoe.ops.linear_cross_entropy import chunked, linear_cross_entropy
from megamoe.ops.linear_cross_entropy import reference as loss_reference
from megamoe.ops.mla_attention import mla_attention, sdpa
from megamoe.ops.mla_attention import reference as attention_reference
from megamoe.ops.rms_norm import gated_rms_norm, rms_norm
from megamoe.ops.short_conv import short_conv
from megamoe.ops.situ_glu import gated_activation

f64 = torch.float64


def leaf(*shape, scale=1.0):
    return (torch.randn(*shape, dtype=f64) * scale).requires_grad_()


def cu(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_norms_are_their_formulas_and_their_gradients_exact():
    x, w, gate = leaf(5, 3, 8), leaf(8), leaf(5, 3, 8)
    plain = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
    torch.testing.assert_close(rms_norm(x, w, eps=1e-5), plain)
    torch.testing.assert_close(gated_rms_norm(x, w, gate, eps=1e-5), plain * torch.sigmoid(gate))
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, eps=1e-5), (x, w))
    assert torch.autograd.gradcheck(lambda *a: gated_rms_norm(*a, eps=1e-5), (x, w, gate))


def test_norm_casts_before_the_weight():
    """The released order: visible in bf16, where rounding before and after the weight differ."""
    x, w = torch.randn(200, 64).bfloat16(), torch.randn(64).bfloat16()
    x32 = x.float()
    expected = (x32 * (x32.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16() * w
    assert torch.equal(rms_norm(x, w, eps=1e-5), expected)


def test_situ_is_bounded_and_silu_near_zero():
    g, u = leaf(4000, scale=60.0), leaf(4000, scale=200.0)
    y = gated_activation(g, u, act="situ")
    assert y.abs().max() <= 100 and y.abs().max() > 90
    small = torch.linspace(-0.05, 0.05, 101, dtype=f64)
    assert (gated_activation(small, small, act="situ") - gated_activation(small, small, act="silu")).abs().max() < 1e-6


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_activation_gradients(act):
    g, u = leaf(40, scale=4.0), leaf(40, scale=20.0)
    expected = F.silu(g) * u if act == "silu" else 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    torch.testing.assert_close(gated_activation(g, u, act=act), expected)
    assert torch.autograd.gradcheck(lambda a, b: gated_activation(a, b, act=act), (g, u))


@pytest.mark.parametrize("lengths", [(1,), (2, 0, 3), (7, 1, 4), (0, 5)])
def test_convolution_of_each_document_alone(lengths):
    """Against torch's own convolution, per document, with history and the history left behind."""
    C, W = 6, 4
    T = sum(lengths)
    x, w, history = leaf(T, C), leaf(C, 1, W), leaf(len(lengths), W - 1, C)
    got, last = short_conv(x, w, cu_seqlens=cu(*lengths), history_NWC=history, output_final_history=True)
    expected, lasts = [], []
    for document, h in zip(x.split(lengths), history):
        whole = torch.cat([h, document])
        lasts.append(whole[-(W - 1) :])
        expected.append(F.silu(F.conv1d(whole.T[None], w, groups=C)[0].T) if len(document) else document)
    torch.testing.assert_close(got, torch.cat(expected))
    torch.testing.assert_close(last, torch.stack(lasts))
    upstream = torch.randn_like(got)
    grads = [torch.autograd.grad(y, [x, w, history], upstream) for y in (got, torch.cat(expected))]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)
    without = short_conv(x, w, cu_seqlens=cu(*lengths))[0]
    torch.testing.assert_close(without, short_conv(x, w, cu_seqlens=cu(*lengths), history_NWC=torch.zeros_like(history))[0])


def test_convolution_backward_is_the_derivative():
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w, cu_seqlens=cu(5, 0, 2))[0], (leaf(7, 3), leaf(3, 1, 4)))


@pytest.mark.parametrize("lengths", [(1,), (9,), (4, 0, 4, 1, 8), (0, 3, 3)])
def test_attention_core_matches_reference_with_every_gradient(lengths):
    T, H, Q, V = sum(lengths), 3, 12, 8
    q, k, v = leaf(T, H, Q), leaf(T, H, Q), leaf(T, H, V)
    results = []
    for fn in (attention_reference.mla_attention, sdpa.mla_attention):
        o = fn(q, k, v, cu_seqlens=cu(*lengths), scale=0.3)
        results.append((o, *torch.autograd.grad(o.sin().sum(), [q, k, v])))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-10)


def test_attention_looks_at_its_document_and_back_only():
    T, H = 12, 2
    q, k, v = (torch.randn(T, H, 8) for _ in range(3))
    o = mla_attention(q, k, v, cu_seqlens=cu(5, 7), scale=0.5)
    k2, v2 = k.clone(), v.clone()
    k2[[2, 9]], v2[[2, 9]] = 100.0, -100.0
    o2 = mla_attention(q, k2, v2, cu_seqlens=cu(5, 7), scale=0.5)
    changed = (o2 != o).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, True, True] + [False] * 4 + [True] * 3
    assert mla_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu_seqlens=cu(5, 7), scale=0.5).dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
def test_loss_in_slices_matches_all_logits_at_once(chunk, monkeypatch):
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", chunk)
    h, w = leaf(11, 6), leaf(9, 6)
    labels = torch.randint(0, 9, (11,))
    labels[[0, 4, 10]] = -100
    upstream = torch.rand(11, dtype=f64)
    results = []
    for fn in (loss_reference.linear_cross_entropy, chunked.linear_cross_entropy):
        loss = fn(h, w, labels)
        results.append((loss, *torch.autograd.grad(loss, [h, w], upstream)))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, atol=1e-13, rtol=1e-12)
    assert not results[1][0][[0, 4, 10]].any()


def test_loss_of_large_bfloat16_logits_is_finite_and_right():
    h, w = torch.randn(8, 32).bfloat16() * 30, torch.randn(50, 32).bfloat16() * 30
    labels = torch.randint(0, 50, (8,))
    loss = linear_cross_entropy(h, w, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(h.double() @ w.double().T, labels, reduction="none"), atol=1e-2, rtol=1e-5)
    zero = linear_cross_entropy(torch.zeros(2, 4), torch.randn(7, 4), torch.tensor([0, 3]))
    torch.testing.assert_close(zero, torch.full((2,), math.log(7.0)))
