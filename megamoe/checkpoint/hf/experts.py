"""MXFP4 experts on their way in and out.

Encoding what was decoded gives the same values but not the same bytes (see `megamoe.ops.mxfp4`), so an export starts
from the source's own codes and scales, and encodes anew only those groups of 32 whose values are no longer what those
decode to. An untouched expert leaves as it came; in a trained one only the groups that moved change.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from megamoe.ops import mxfp4

# Elements decoded or encoded at once: the op's temporaries are some 20 bytes an element.
SLAB = 1 << 20


def _slabs(rows: int, columns: int):
    step = max(1, SLAB // max(columns, 1))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


@functools.cache
def _tables() -> tuple[np.ndarray, torch.Tensor]:
    """Every byte's two elements at scale 1, as one int32 of two bf16; every scale byte's power of two, bf16."""
    every = torch.arange(256, dtype=torch.uint8)
    pairs = mxfp4.decode(every[:, None].repeat(1, 16), torch.full((256, 1), 127, dtype=torch.uint8))
    powers = mxfp4.decode(torch.full((256, 16), 2, dtype=torch.uint8), every[:, None].clone())
    return pairs[:, :2].contiguous().view(torch.int32).flatten().numpy(), powers[:, 0].contiguous()


def decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`mxfp4.decode` of two-dim CPU tensors, to the bit. In bf16 three times as fast: a look-up for each byte.

    Scales at the ends of the range go through the op: there a product could be subnormal, or infinite.
    """
    if dtype != torch.bfloat16 or bool(((scale < 3) | (scale > 252)).any()):
        return mxfp4.decode(packed, scale, dtype)
    pairs, powers = _tables()
    out = torch.from_numpy(np.take(pairs, packed.contiguous().numpy())).view(torch.bfloat16)
    out.unflatten(-1, (-1, 32)).mul_(powers[scale.long()][..., None])
    return out


def decode_stack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(n, O, K/2) and (n, O, K/32) uint8 -> (n, O, K) bf16, exact."""
    n, rows, half = packed.shape
    out = torch.empty(n, rows, 2 * half, dtype=torch.bfloat16)
    flat, p, s = out.view(n * rows, -1), packed.view(n * rows, -1), scale.view(n * rows, -1)
    for a, b in _slabs(n * rows, 2 * half):
        flat[a:b] = decode(p[a:b], s[a:b])
    return out


def encode_stack(values: torch.Tensor, carried: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes and scales of a stack of matrices.

    Args:
        values: (n, O, K) bf16 or fp32.
        carried: the source's codes and scales, or None: then everything is encoded.

    Returns: packed (n, O, K/2) and scale (n, O, K/32) uint8, and how many groups were encoded anew.
    """
    n, rows, columns = values.shape
    packed = torch.empty(n, rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(n, rows, columns // 32, dtype=torch.uint8)
    v, p, s = values.view(n * rows, columns), packed.view(n * rows, -1), scale.view(n * rows, -1)
    encoded = 0
    for a, b in _slabs(n * rows, columns):
        if carried is None:
            p[a:b], s[a:b] = mxfp4.encode(v[a:b])
            encoded += s[a:b].numel()
            continue
        p[a:b], s[a:b] = (t.view(n * rows, -1)[a:b] for t in carried)
        before = decode(p[a:b], s[a:b], values.dtype)
        bits = torch.int16 if values.dtype == torch.bfloat16 else torch.int32
        # By bits: NaN equals itself, and the two zeros differ.
        changed = (before.view(bits) != v[a:b].contiguous().view(bits)).unflatten(-1, (-1, 32)).any(-1)
        touched = changed.any(-1).nonzero().flatten()
        if not touched.numel():
            continue
        new_p, new_s = mxfp4.encode(v[a:b][touched])
        where = changed[touched]
        old_p, old_s = p[a:b][touched], s[a:b][touched]
        p[a + touched] = torch.where(where[..., None], new_p.unflatten(-1, (-1, 16)), old_p.unflatten(-1, (-1, 16))).flatten(-2)
        s[a + touched] = torch.where(where, new_s, old_s)
        encoded += int(where.sum())
    return packed, scale, encoded
