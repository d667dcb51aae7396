"""MXFP4: 4-bit floats (E2M1) in groups of 32 with one power-of-two scale (E8M0) each, and their use in training.

    x[o, 32 g + r] = E2M1(code) * 2^(scale[o, g] - 127)

    code & 7   0   1    2   3    4   5   6   7          bit 3 is the sign
    E2M1       0   0.5  1   1.5  2   3   4   6
    byte j of a row holds element 2j in its low nibble, element 2j + 1 in its high one

A scale byte of 255 makes its whole group NaN. Source: OCP Microscaling Formats v1.0; code ours.
"""

from __future__ import annotations

import torch

from megamoe.ops.backends import triton_backend
from megamoe.ops.registry import choose, register

ENCODE_OP = "mxfp4_encode"
DECODE_OP = "mxfp4_decode"
GROUP = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dim.

    The scale is the smallest power of two at which the group's largest magnitude does not exceed 6, so nothing is
    clipped; 1 for a group of zeros; never below 2^-127. Elements round to the nearest code, ties to the even code. The
    sign survives, of zeros too. A group with a NaN or an infinity gets scale 255 and codes 0.

    Args:
        x: (..., K) fp32, bf16 or fp16, K a multiple of 32.

    Returns:
        packed: (..., K/2) uint8. scale: (..., K/32) uint8.

    Raises:
        ValueError: another dtype, or a width that is no multiple of 32.

    Decoding and encoding again gives the same values, but smaller scales in groups whose largest code is 3 or less: bytes
    that must stay are carried, not encoded anew. fp32 subnormals count as zero where the CPU flushes them.
    No collective, no host sync. Twin: reference.py.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"mxfp4.encode: x is {x.dtype}, expected float32, bfloat16 or float16")
    _check_width(x)
    return choose(ENCODE_OP, device=x.device.type, dtype=x.dtype)(x)


def decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values, exact in fp32 and in bf16 but for what exceeds their range (scale bytes 253 and 254), which is infinite.

    Args:
        packed: (..., K/2) uint8. scale: (..., K/32) uint8.
        dtype: of the result, fp32, bf16 or fp16. fp16 rounds what lies outside its range.

    Returns: (..., K).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"mxfp4.decode: packed is {packed.dtype} and scale {scale.dtype}, expected uint8 both")
    if dtype not in DTYPES:
        raise ValueError(f"mxfp4.decode: dtype is {dtype}, expected float32, bfloat16 or float16")
    if packed.dim() < 1 or packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(f"mxfp4.decode: packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not fit: expected (..., K/2) and (..., K/{GROUP})")
    return choose(DECODE_OP, device=packed.device.type, dtype=dtype)(packed, scale, dtype)


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """decode(encode(x)) in x's dtype; its gradient passes unchanged (straight-through). For weights, (..., K)."""
    return _StraightThrough.apply(x, lambda v: decode(*encode(v), v.dtype))


def fake_quantize_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """What MXFP8 makes of activations: E4M3 in groups of 32, straight-through gradient, x's dtype.

    Scale by OCP's rule, 2^(floor(log2 amax) - 8), values past 448 saturate, ties to even. NaN and infinity: as `encode`.

    Args:
        x: (..., K) fp32, bf16 or fp16, K a multiple of 32.
    """
    from megamoe.ops.mxfp4.reference import round_mxfp8

    if x.dtype not in DTYPES:
        raise ValueError(f"fake_quantize_mxfp8: x is {x.dtype}, expected float32, bfloat16 or float16")
    _check_width(x)
    return _StraightThrough.apply(x, round_mxfp8)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantize):
        return quantize(x)

    @staticmethod
    def backward(ctx, dout):
        return dout, None


def _check_width(x: torch.Tensor) -> None:
    if x.dim() < 1 or x.shape[-1] % GROUP:
        raise ValueError(f"mxfp4: x has shape {tuple(x.shape)}, expected a last dim that is a multiple of {GROUP}")


def _load(name: str):
    from megamoe.ops.mxfp4 import reference

    return getattr(reference, name)


register(ENCODE_OP, "triton", **triton_backend("megamoe.ops.mxfp4.triton", "encode"))
register(ENCODE_OP, "reference", load=lambda: _load("encode"))
register(DECODE_OP, "triton", **triton_backend("megamoe.ops.mxfp4.triton", "decode"))
register(DECODE_OP, "reference", load=lambda: _load("decode"))
