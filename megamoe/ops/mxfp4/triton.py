"""MXFP4 and MXFP8 on a GPU. Encoding and rounding: a program takes whole groups. Decoding: a program takes consecutive elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUPS = 64
ELEMENTS = 4096


@triton.jit
def _power_of_two(biased):
    return tl.where(biased == 0, 0x00400000, tl.where(biased == 255, 0x7FC00000, biased << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, packed, scales, M, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = group < M
    v = tl.load(x + group[:, None] * 32 + tl.arange(0, 32)[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    bits = v.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1)
    # 6 = 1.5 * 2^2: one exponent higher when the mantissa exceeds 1.5.
    scale = tl.maximum((largest >> 23) - 2 + ((largest & 0x007FFFFF) > 0x00400000).to(tl.int32), 0)
    scale = tl.where(largest == 0, 127, scale)
    broken = largest >= 0x7F800000
    a = tl.abs(v) * _power_of_two(254 - scale)[:, None]
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    code = tl.where(broken[:, None], 0, code | ((bits >> 28) & 8))
    pairs = tl.reshape(code << (4 * (tl.arange(0, 32) % 2))[None, :], (GROUPS, 16, 2))
    tl.store(packed + group[:, None] * 16 + tl.arange(0, 16)[None, :], tl.sum(pairs, 2).to(tl.uint8), mask=here[:, None])
    tl.store(scales + group, tl.where(broken, 255, scale).to(tl.uint8), mask=here)


@triton.jit
def _decode(packed, scales, out, N, ELEMENTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < N
    byte = tl.load(packed + i // 2, mask=mask, other=0).to(tl.int32)
    code = (byte >> (4 * (i % 2)).to(tl.int32)) & 15
    scale = tl.load(scales + i // 32, mask=mask, other=0).to(tl.int32)
    size = code & 7
    # From 1 on: exponent (size >> 1) - 1 and one bit of mantissa. Below: 0 and 0.5.
    normal = ((((size >> 1) + 126) << 23) | ((size & 1) << 22)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, 0.5 * size.to(tl.float32), normal) * _power_of_two(scale)
    value = (value.to(tl.int32, bitcast=True) ^ ((code >> 3) << 31)).to(tl.float32, bitcast=True)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _round(x, out, M, MXFP8: tl.constexpr, GROUPS: tl.constexpr):
    """Nearest value instead of nearest code: steps of the format are powers of two, so adding 2^23 rounds to them, ties to even."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = group < M
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + at, mask=here[:, None], other=0.0).to(tl.float32)
    bits = v.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1)
    if MXFP8:
        scale = tl.maximum((largest >> 23) - 8, 0)
    else:
        scale = tl.maximum((largest >> 23) - 2 + ((largest & 0x007FFFFF) > 0x00400000).to(tl.int32), 0)
    scale = tl.where(largest == 0, 127, scale)
    a = tl.abs(v) * _power_of_two(254 - scale)[:, None]
    # Exponent of the step between neighbours at a: E4M3 has 3 bits of mantissa from 2^-6 on, E2M1 one from 1 on.
    if MXFP8:
        a = tl.minimum(a, 448.0)
        step = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 121) - 3
    else:
        step = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, 127) - 1
    steps = (a * _power_of_two(254 - step) + 8388608.0) - 8388608.0
    value = steps * _power_of_two(step) * _power_of_two(scale)[:, None]
    value = (value.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    value = tl.where((largest >= 0x7F800000)[:, None], float("nan"), value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=here[:, None])


def why_not(*, device="cuda", dtype=torch.bfloat16, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype == torch.float64:
        return "takes no float64"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def encode(x):
    """See the contract in `megamoe.ops.mxfp4`."""
    x, K = x.contiguous(), x.shape[-1]
    packed = torch.empty(*x.shape[:-1], K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], K // 32, dtype=torch.uint8, device=x.device)
    M = scale.numel()
    if M:
        _encode[(triton.cdiv(M, GROUPS),)](x, packed, scale, M, GROUPS=GROUPS)
    return packed, scale


def decode(packed, scale, dtype=torch.bfloat16):
    """See the contract in `megamoe.ops.mxfp4`."""
    packed, scale = packed.contiguous(), scale.contiguous()
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    N = out.numel()
    if N:
        _decode[(triton.cdiv(N, ELEMENTS),)](packed, scale, out, N, ELEMENTS=ELEMENTS)
    return out


def round_to(x, form):
    """See the contract in `megamoe.ops.mxfp4`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    M = x.numel() // 32
    if M:
        _round[(triton.cdiv(M, GROUPS),)](x, out, M, MXFP8=form == "mxfp8", GROUPS=GROUPS)
    return out
