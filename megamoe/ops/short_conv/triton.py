"""The short convolution with SiLU in one pass forward and one backward.

A program owns BC channels and walks over consecutive tokens with the last W-1 inputs in registers, STEP tokens unrolled at a
time so that their loads are in flight together. Backward rebuilds z, looks W-1 tokens ahead for dx, and keeps the taps'
gradients in registers: one fp32 line per program, added up by a second launch in a fixed order. A token's taps stop at its
document's start, known from its position.

With a history in front of documents (decoding, context parallel) the plain path runs instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.ops.packing import document_positions
from megamoe.ops.short_conv import reference

STEP = 16
STEPS = 8
BC, BC_BWD = 512, 256
MAX_TAPS = 8


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load(x, t, c, T, C, inside):
    """Row t of x in fp32, zero outside the stream."""
    return tl.load(x + t * C + c, mask=inside & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@triton.jit
def _fwd(x, weight, position, y, T, C, W: tl.constexpr, BC: tl.constexpr, STEP: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    w = ()
    for j in tl.static_range(W):  # w[j] multiplies x[t-j]
        w = w + (tl.load(weight + c * W + (W - 1 - j), mask=inside, other=0.0).to(tl.float32),)
    first = tl.program_id(1).to(tl.int64) * STEP
    past = ()  # x[t-W+1] … x[t-1]
    for j in tl.static_range(W - 1):
        past = past + (_load(x, first + (j - (W - 1)), c, T, C, inside),)
    for i in tl.static_range(STEP):
        t = first + i
        p = tl.load(position + t, mask=t < T, other=0)
        now = _load(x, t, c, T, C, inside)
        z = now * w[0]
        for j in tl.static_range(1, W):
            z += tl.where(p >= j, past[i + W - 1 - j], 0.0) * w[j]
        past = past + (now,)
        tl.store(y + t * C + c, (z * _sigmoid(z)).to(y.dtype.element_ty), mask=inside & (t < T))


@triton.jit
def _bwd(x, weight, position, dy, dx, dw_PWC, T, C, W: tl.constexpr, BC: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < C
    w = ()
    dw = ()
    for j in tl.static_range(W):
        w = w + (tl.load(weight + c * W + (W - 1 - j), mask=inside, other=0.0).to(tl.float32),)
        dw = dw + (tl.zeros([BC], tl.float32),)
    begin = tl.program_id(1).to(tl.int64) * (STEP * STEPS)
    for step in tl.range(0, STEPS):
        first = begin + step * STEP
        past = ()
        for j in tl.static_range(W - 1):
            past = past + (_load(x, first + (j - (W - 1)), c, T, C, inside),)
        dz = ()  # dz[i] and p[i] of token first + i
        p = ()
        for i in tl.static_range(STEP + W - 1):
            t = first + i
            here = tl.load(position + t, mask=t < T, other=0)
            now = _load(x, t, c, T, C, inside)
            z = now * w[0]
            for j in tl.static_range(1, W):
                z += tl.where(here >= j, past[i + W - 1 - j], 0.0) * w[j]
            s = _sigmoid(z)
            d = _load(dy, t, c, T, C, inside) * s * (1.0 + z * (1.0 - s))
            past = past + (now,)
            dz = dz + (d,)
            p = p + (here,)
            if i < STEP:
                grown = (dw[0] + d * now,)
                for j in tl.static_range(1, W):
                    grown = grown + (dw[j] + tl.where(here >= j, d * past[i + W - 1 - j], 0.0),)
                dw = grown
            if i >= W - 1:
                out = dz[i - (W - 1)] * w[0]
                for j in tl.static_range(1, W):
                    out += tl.where(p[i - (W - 1) + j] >= j, dz[i - (W - 1) + j], 0.0) * w[j]
                s_t = t - (W - 1)
                tl.store(dx + s_t * C + c, out.to(dx.dtype.element_ty), mask=inside & (s_t < T))
    line = dw_PWC + tl.program_id(1).to(tl.int64) * W * C
    for j in tl.static_range(W):
        tl.store(line + (W - 1 - j) * C + c, dw[j], mask=inside)


def why_not(*, device="cuda", dtype=torch.bfloat16, W=4, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dtype}"
    if not 2 <= W <= MAX_TAPS:
        return f"takes 2 to {MAX_TAPS} taps, got {W}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def short_conv(x_TC, weight_C1W, *, cu_seqlens, history_NWC=None, output_final_history=False):
    """See the contract in `megamoe.ops.short_conv`."""
    if history_NWC is not None:
        return reference.short_conv(x_TC, weight_C1W, cu_seqlens=cu_seqlens, history_NWC=history_NWC, output_final_history=output_final_history)
    y_TC = _ConvSiLU.apply(x_TC, weight_C1W, document_positions(cu_seqlens, x_TC.shape[0]))
    return y_TC, reference._final_history(x_TC, weight_C1W.shape[-1], cu_seqlens, None) if output_final_history else None


class _ConvSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TC, weight_C1W, position_T):
        x_TC, weight_C1W = x_TC.contiguous(), weight_C1W.contiguous()
        ctx.save_for_backward(x_TC, weight_C1W, position_T)
        (T, C), W = x_TC.shape, weight_C1W.shape[-1]
        y_TC = torch.empty_like(x_TC)
        if T:
            _fwd[(triton.cdiv(C, BC), triton.cdiv(T, STEP))](x_TC, weight_C1W, position_T, y_TC, T, C, W=W, BC=BC, STEP=STEP, num_warps=4)
        return y_TC

    @staticmethod
    def backward(ctx, dy_TC):
        x_TC, weight_C1W, position_T = ctx.saved_tensors
        (T, C), W = x_TC.shape, weight_C1W.shape[-1]
        dx_TC = torch.empty_like(x_TC)
        if not T:
            return dx_TC, torch.zeros_like(weight_C1W), None
        lines = triton.cdiv(T, STEP * STEPS)
        dw_PWC = torch.empty(lines, W, C, dtype=torch.float32, device=x_TC.device)
        _bwd[(triton.cdiv(C, BC_BWD), lines)](
            x_TC, weight_C1W, position_T, dy_TC.contiguous(), dx_TC, dw_PWC, T, C, W=W, BC=BC_BWD, STEP=STEP, STEPS=STEPS, num_warps=4
        )
        return dx_TC, dw_PWC.sum(0).t().reshape(weight_C1W.shape).to(weight_C1W.dtype), None
