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
ROUND_OP = "mx_round"
GROUP = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUND_DTYPES = (*DTYPES, torch.float64)
FORMS = ("mxfp4", "mxfp8")


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


def round_to(x: torch.Tensor, form: str) -> torch.Tensor:
    """The nearest values that a block format has, in x's dtype; carries no gradient.

    mxfp4: decode(encode(x)), bit for bit, in one pass that writes no codes.
    mxfp8: E4M3 in groups of 32. Scale by OCP's rule, 2^(floor(log2 amax) - 8); values past 448 saturate, ties go to even.
    A group with a NaN or an infinity becomes NaN. float64 is rounded to fp32 first.

    Args:
        x: (..., K) fp32, bf16, fp16 or fp64, K a multiple of 32.
        form: `mxfp4` or `mxfp8`.

    Raises:
        ValueError: another dtype, width or form.

    No collective, no host sync. Twin: reference.py.
    """
    if form not in FORMS:
        raise ValueError(f"mxfp4.round_to: form={form!r} must be one of {', '.join(FORMS)}")
    if x.dtype not in ROUND_DTYPES:
        raise ValueError(f"mxfp4.round_to: x is {x.dtype}, expected float32, bfloat16, float16 or float64")
    _check_width(x)
    return choose(ROUND_OP, device=x.device.type, dtype=x.dtype)(x.detach(), form)


def fake_quantize(x: torch.Tensor, form: str = "mxfp4", rounded: torch.Tensor | None = None) -> torch.Tensor:
    """`round_to` whose gradient passes unchanged (straight-through), also where values saturate.

    Args:
        rounded: what `round_to(x, form)` gave earlier, of an x that has not changed since: spares the pass.
    """
    return _StraightThrough.apply(x, round_to(x, form) if rounded is None else rounded)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounded):
        # A gradient that its taker has added elsewhere (`main_grad`) arrives as None and shall not become zeros.
        ctx.set_materialize_grads(False)
        return rounded.view_as(rounded)

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
register(ROUND_OP, "triton", **triton_backend("megamoe.ops.mxfp4.triton", "round_to"))
register(ROUND_OP, "reference", load=lambda: _load("round_to"))
