"""The router's product is an fp32 product, however it is computed.

Why: a score that is off by bf16's rounding picks other experts than the reference does, and no loss shows it. The splitting
itself is checked on CPU; the tensor-core path needs a GPU. Not covered: speed.
"""

from __future__ import annotations

import pytest
import torch

from megamoe.ops.router_logits import reference, router_logits, split


def error(x, ref):
    return ((x.double() - ref).norm() / ref.norm()).item()


def test_three_bf16_pieces_hold_every_bit_of_fp32():
    x = torch.randn(10_000) * torch.logspace(-6, 6, 10_000)
    assert torch.equal(sum(p.double() for p in split.pieces(x)), x.double())
    assert split.pieces(x.bfloat16())[0].dtype == torch.bfloat16 and len(split.pieces(x.bfloat16())) == 1


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_split_product_and_gradients_are_as_close_to_float64_as_fp32(device, weight_dtype):
    torch.manual_seed(0)
    N, E, D = (1024, 896, 7168) if device == "cuda" else (32, 24, 512)
    x = torch.randn(N, D, device=device).bfloat16().requires_grad_()
    w = (torch.randn(E, D, device=device) * D**-0.5).to(weight_dtype).requires_grad_()
    d = torch.randn(N, E, device=device) * (torch.rand(N, E, device=device) < 0.05)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = wide[0] @ wide[1].t()
    exact_grads = torch.autograd.grad(exact, wide, d.double())
    logits, plain = split.router_logits(x, w), reference.router_logits(x, w)
    assert logits.dtype == torch.float32 and error(logits, exact) <= max(1.5 * error(plain, exact), 1e-6)
    for g, p, e in zip(torch.autograd.grad(logits, [x, w], d), torch.autograd.grad(plain, [x, w], d), exact_grads):
        assert g.dtype == p.dtype and error(g, e) <= max(1.05 * error(p, e), 1e-5)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"router_logits: x \(2, 8\) and weight \(4, 16\)"):
        router_logits(torch.zeros(2, 8), torch.zeros(4, 16))
