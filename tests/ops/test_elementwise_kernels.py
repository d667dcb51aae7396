"""The one-pass kernels around the products (norms, gated activation, short convolution) compute what their plain twins do.

Why: they sit in every layer, so a wrong tail row or a tap across a document's start would touch every token a little and
raise nothing. Each is checked forward and in every gradient. On CPU they run on Triton's interpreter (TRITON_INTERPRET=1), in
fp32 and small; on a GPU in bf16 at widths that do not divide a block. Not covered: speed (tools/bench_moe.py elementwise).
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 to run Triton kernels on CPU", allow_module_level=True)

DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)


def error(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm().clamp(min=1e-30)).item()


def compare(fast, plain, leaves, seed=0):
    """Values and gradients of `fast` are as close to float64 as those of `plain` in the same dtype, and repeat bitwise."""
    gen = torch.Generator().manual_seed(seed)

    def run(op, cast):
        ins = [cast(x).requires_grad_() for x in leaves]
        out = op(*ins)
        return [out, *torch.autograd.grad(out, ins, cast(dout))]

    with torch.no_grad():
        dout = torch.randn(plain(*leaves).shape, generator=gen).to(DEVICE, plain(*leaves).dtype)
    exact = run(plain, lambda x: x.detach().double())
    twin, got, again = (run(op, lambda x: x.detach().clone()) for op in (plain, fast, fast))
    for i, (g, t, e, a) in enumerate(zip(got, twin, exact, again)):
        assert g.dtype == t.dtype and torch.isfinite(g).all(), i
        assert error(g, e) <= 1.5 * error(t, e) + 2e-6, f"result {i}: {error(g, e):.2e} against {error(t, e):.2e}"
        assert torch.equal(g, a), i


def random(*shape, dtype=DTYPE, scale=1.0, seed=0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))).to(DEVICE, dtype)


WIDE = [(300, 7168), (1000, 128), (3, 96, 128), (77, 3592)] if ON_GPU else [(5, 72), (40, 16), (3, 4, 32)]


@pytest.mark.parametrize("shape", WIDE)
def test_rms_norm_matches_its_twin(shape):
    from megamoe.ops.rms_norm import reference, triton

    compare(lambda x, w: triton.rms_norm(x, w, eps=1e-5), lambda x, w: reference.rms_norm(x, w, eps=1e-5), [random(*shape), random(shape[-1], seed=1)])


@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("x_dtype", [DTYPE, torch.float32])
def test_gated_rms_norm_matches_its_twin(shape, x_dtype):
    from megamoe.ops.rms_norm import reference, triton

    leaves = [random(*shape, dtype=x_dtype), random(shape[-1], dtype=torch.float32, seed=1), random(*shape, seed=2)]
    compare(lambda x, w, g: triton.gated_rms_norm(x, w, g, eps=1e-5), lambda x, w, g: reference.gated_rms_norm(x, w, g, eps=1e-5), leaves)


@pytest.mark.parametrize("act", ["situ", "silu"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_gated_activation_matches_its_twin(act, scale):
    from megamoe.ops.situ_glu import reference, triton

    shape = (333, 1000) if ON_GPU else (7, 30)
    leaves = [random(*shape, scale=scale), random(*shape, scale=scale, seed=1)]
    compare(lambda g, u: triton.gated_activation(g, u, act=act), lambda g, u: reference.gated_activation(g, u, act=act), leaves)


@pytest.mark.parametrize("lengths, W", [([21], 4), ([1, 0, 2, 3, 9, 7, 0], 4), ([5, 1, 1, 6], 2), *([([200, 1, 1, 129], 4), ([3000, 1072], 4)] if ON_GPU else [])])
def test_short_conv_matches_its_twin_and_stops_at_documents(lengths, W, monkeypatch):
    from megamoe.ops.short_conv import reference, triton

    if not ON_GPU:
        monkeypatch.setattr(triton, "BC", 32)
        monkeypatch.setattr(triton, "BC_BWD", 32)
        monkeypatch.setattr(triton, "STEP", 4)
        monkeypatch.setattr(triton, "STEPS", 3)
    C = 712 if ON_GPU else 40
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    leaves = [random(sum(lengths), C), random(C, 1, W, dtype=torch.float32, seed=1)]
    compare(lambda x, w: triton.short_conv(x, w, cu_seqlens=cu)[0], lambda x, w: reference.short_conv(x, w, cu_seqlens=cu)[0], leaves)


def test_kernels_take_no_rows():
    from megamoe.ops.rms_norm import triton as norm
    from megamoe.ops.short_conv import triton as conv
    from megamoe.ops.situ_glu import triton as glu

    x, w = random(0, 64).requires_grad_(), random(64).requires_grad_()
    taps = random(64, 1, 4, dtype=torch.float32).requires_grad_()
    cu = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    outs = [norm.rms_norm(x, w, eps=1e-5), glu.gated_activation(x, x, act="situ"), conv.short_conv(x, taps, cu_seqlens=cu)[0]]
    sum(o.sum() for o in outs).backward()
    assert all(o.shape == (0, 64) for o in outs) and w.grad.abs().max() == 0 and taps.grad.abs().max() == 0
