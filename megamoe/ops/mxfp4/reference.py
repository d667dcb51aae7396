"""MXFP4 in plain PyTorch. Scales come from exponent bits, never from a logarithm: exact for every fp32 number."""

from __future__ import annotations

import torch

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_MAGNITUDE = 0x7FFFFFFF
_MANTISSA = 0x007FFFFF
_INFINITY = 0x7F800000
# 1.5 in the mantissa field: 6 = 1.5 * 2^2, so the largest element fits under 6 * 2^e up to here.
_HALF = 0x00400000


def encode(x):
    """See the contract in `megamoe.ops.mxfp4`."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = _largest_bits(groups)
    scale = ((largest >> 23) - 2 + ((largest & _MANTISSA) > _HALF).int()).clamp(min=0)
    scale = torch.where(largest == 0, 127, scale)
    broken = largest >= _INFINITY
    a = groups.abs() * _power_of_two(254 - scale)[..., None]
    # Strict where the code below is even, inclusive where the one above is: ties to even.
    code = (a > 0.25).int() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = torch.where(broken[..., None], 0, code | (torch.signbit(groups).int() << 3))
    low, high = code.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).to(torch.uint8), torch.where(broken, 255, scale).to(torch.uint8)


def decode(packed, scale, dtype=torch.bfloat16):
    """See the contract in `megamoe.ops.mxfp4`."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    x = values[codes.long()].unflatten(-1, (-1, GROUP)) * _power_of_two(scale.int())[..., None]
    return x.flatten(-2).to(dtype)


def round_to(x, form):
    """See the contract in `megamoe.ops.mxfp4`."""
    if form == "mxfp4":
        return decode(*encode(x), torch.float32).to(x.dtype)
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = _largest_bits(groups)
    scale = ((largest >> 23) - 8).clamp(min=0)
    scale = torch.where(largest >= _INFINITY, 255, torch.where(largest == 0, 127, scale))
    # 255 has no inverse: its group is NaN through the last product whatever stands here.
    a = (groups * _power_of_two((254 - scale).clamp(min=0))[..., None]).clamp(-448.0, 448.0)
    return (a.to(torch.float8_e4m3fn).float() * _power_of_two(scale)[..., None]).flatten(-2).to(x.dtype)


def _largest_bits(groups):
    """Bits of each group's largest magnitude. As integers they order like the numbers, with infinity and NaN on top."""
    return (groups.contiguous().view(torch.int32) & _MAGNITUDE).amax(-1)


def _power_of_two(biased):
    """2^(biased - 127) in fp32 for int 0 … 254, NaN for 255. A shift alone would give 0 for 0 and infinity for 255."""
    bits = torch.where(biased == 0, _HALF, torch.where(biased == 255, 0x7FC00000, biased << 23))
    return bits.int().view(torch.float32)
