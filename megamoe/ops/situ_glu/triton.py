"""SiTU-GLU and SwiGLU in one pass forward and one backward, and the device functions that fused products share.

bf16 uses the hardware's tanh (relative error 2^-11, a quarter of bf16's rounding); fp32 the accurate form. The sigmoid is the
accurate one in both: built from tanh it would lose its lower tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def tanh(x, APPROX: tl.constexpr):
    """tanh in fp32. APPROX: one instruction. Else exact to a few ulp, also near zero."""
    if APPROX:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    a = tl.abs(x)
    decayed = tl.exp(-2.0 * a)
    big = (1.0 - decayed) / (1.0 + decayed)
    square = x * x
    # Below 0.1 the quotient cancels; three terms of the series are exact to fp32 there.
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(a < 0.1, small, tl.where(x < 0, -big, big))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(g, u, beta, linear_beta, SITU: tl.constexpr, APPROX: tl.constexpr):
    """The gated activation of fp32 g and u: see `megamoe.ops.situ_glu`."""
    if SITU:
        return beta * tanh(g / beta, APPROX) * sigmoid(g) * (linear_beta * tanh(u / linear_beta, APPROX))
    return g * sigmoid(g) * u


@triton.jit
def act_bwd(g, u, dh, beta, linear_beta, SITU: tl.constexpr, APPROX: tl.constexpr):
    """(dg, du, act(g, u)): gradients as in reference.py, and the value itself."""
    s = sigmoid(g)
    if SITU:
        tg = tanh(g / beta, APPROX)
        tu = tanh(u / linear_beta, APPROX)
        left = beta * tg * s
        right = linear_beta * tu
        return ((1.0 - tg * tg) * s + left * (1.0 - s)) * right * dh, left * (1.0 - tu * tu) * dh, left * right
    return s * (1.0 + g * (1.0 - s)) * u * dh, g * s * dh, g * s * u


@triton.jit
def _fwd(gate, up, out, count, beta, linear_beta, SITU: tl.constexpr, APPROX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, act(g, u, beta, linear_beta, SITU, APPROX).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bwd(gate, up, dout, dgate, dup, count, beta, linear_beta, SITU: tl.constexpr, APPROX: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
    dg, du, _ = act_bwd(g, u, d, beta, linear_beta, SITU, APPROX)
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + at, du.to(dup.dtype.element_ty), mask=mask)


def why_not(*, device="cuda", dtype=torch.bfloat16, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dtype}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def gated_activation(gate, up, *, act, beta=4.0, linear_beta=25.0):
    """See the contract in `megamoe.ops.situ_glu`."""
    return _GatedActivation.apply(gate, up, act == "situ", beta, linear_beta)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, situ, beta, linear_beta):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.how = dict(SITU=situ, APPROX=gate.is_cuda and gate.dtype == torch.bfloat16, BLOCK=BLOCK, num_warps=8)
        ctx.bounds = (beta, linear_beta)
        out = torch.empty_like(gate)
        if out.numel():
            _fwd[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), *ctx.bounds, **ctx.how)
        return out

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            _bwd[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, dout.contiguous(), dgate, dup, gate.numel(), *ctx.bounds, **ctx.how)
        return dgate, dup, None, None, None
