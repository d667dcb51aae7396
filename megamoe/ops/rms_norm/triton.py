"""RMSNorm, plain and gated, in one pass forward and one backward.

A program takes whole rows, several at a time when they are short, and walks over its share in a fixed order. The weight's
gradient is one fp32 line per program, added up by a second launch: same bits on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WIDTH = 16384
PROGRAMS_PER_SM = 2


@triton.jit
def _fwd(x, weight, gate, out, M, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr):
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * D + d[None, :]
    mask = (rows < M)[:, None] & (d < D)[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    y = v * (1.0 / tl.sqrt_rn(tl.sum(v * v, 1) / D + eps))[:, None]
    if GATED:
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        y = y * w[None, :] * (1.0 / (1.0 + tl.exp(-g)))
    else:
        # Rounded before the weight, and the weight to the same dtype: the released model's order.
        y = y.to(out.dtype.element_ty).to(tl.float32) * w.to(out.dtype.element_ty).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bwd(x, weight, gate, dout, dx, dgate, dw_PD, M, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr):
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    while first < M:
        rows = first + tl.arange(0, ROWS)
        at = rows[:, None] * D + d[None, :]
        mask = (rows < M)[:, None] & (d < D)[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        do = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt_rn(tl.sum(v * v, 1) / D + eps)
        y = v * r[:, None]
        if GATED:
            s = 1.0 / (1.0 + tl.exp(-tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)))
            tl.store(dgate + at, (do * y * w[None, :] * s * (1.0 - s)).to(dgate.dtype.element_ty), mask=mask)
            do = do * s
        dw += tl.sum(do * y, 0)
        dn = do * w[None, :]
        mean = tl.sum(dn * y, 1) / D
        tl.store(dx + at, (r[:, None] * (dn - y * mean[:, None])).to(dx.dtype.element_ty), mask=mask)
        first += tl.num_programs(0).to(tl.int64) * ROWS
    tl.store(dw_PD + tl.program_id(0) * D + d, dw, mask=d < D)


def why_not(*, device="cuda", dtype=torch.bfloat16, D=1, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dtype}"
    if D > MAX_WIDTH:
        return f"takes rows of at most {MAX_WIDTH}, got {D}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def rms_norm(x, weight_D, *, eps):
    """See the contract in `megamoe.ops.rms_norm`."""
    return _Norm.apply(x, weight_D, None, eps)


def gated_rms_norm(x, weight_D, gate, *, eps):
    """See the contract in `megamoe.ops.rms_norm`."""
    return _Norm.apply(x, weight_D, gate, eps)


def _cut(D: int) -> dict:
    """Whole rows of about 4096 columns together."""
    block = triton.next_power_of_2(D)
    return dict(D=D, BLOCK=block, ROWS=max(1, 4096 // block), num_warps=16 if block >= 8192 else 8)


class _Norm(torch.autograd.Function):
    """Gated when `gate` is given. Keeps the inputs only."""

    @staticmethod
    def forward(ctx, x, weight_D, gate, eps):
        x, weight_D = x.contiguous(), weight_D.contiguous()
        gate = None if gate is None else gate.contiguous()
        ctx.save_for_backward(x, weight_D, gate)
        ctx.eps = eps
        out = torch.empty_like(x if gate is None else gate)
        cut, M = _cut(x.shape[-1]), x.numel() // x.shape[-1]
        if M:
            _fwd[(triton.cdiv(M, cut["ROWS"]),)](x, weight_D, x if gate is None else gate, out, M, eps, GATED=gate is not None, **cut)
        return out

    @staticmethod
    def backward(ctx, dout):
        x, weight_D, gate = ctx.saved_tensors
        D = x.shape[-1]
        cut, M = _cut(D), x.numel() // D
        dx = torch.empty_like(x)
        dgate = None if gate is None else torch.empty_like(gate)
        if not M:
            return dx, torch.zeros_like(weight_D), dgate, None
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        programs = min(triton.cdiv(M, cut["ROWS"]), PROGRAMS_PER_SM * sms)
        dw_PD = torch.empty(programs, D, dtype=torch.float32, device=x.device)
        spare = x if gate is None else gate
        _bwd[(programs,)](x, weight_D, spare, dout.contiguous(), dx, spare if gate is None else dgate, dw_PD, M, ctx.eps, GATED=gate is not None, **cut)
        return dx, dw_PD.sum(0).to(weight_D.dtype), dgate, None
