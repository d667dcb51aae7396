"""Depthwise causal convolution of a few taps with SiLU, over a packed stream: history resets at documents."""

from __future__ import annotations

import torch

from megamoe.ops.backends import triton_backend
from megamoe.ops.registry import choose, register

OP = "short_conv"


def short_conv(
    x_TC: torch.Tensor,
    weight_C1W: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    history_NWC: torch.Tensor | None = None,
    output_final_history: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y[t] = SiLU( sum_j weight[:, 0, W-1-j] * x[t-j] ), j < W, where x before a document's start is its history.

    Args:
        x_TC: (T, C) any float dtype.
        weight_C1W: (C, 1, W), kept in fp32 by the model; computed in fp32 (float64 for float64 inputs).
        cu_seqlens: (n+1,) int32, document starts. Documents may be empty or shorter than W.
        history_NWC: (n, W-1, C) the W-1 inputs in front of each document, oldest first; None means zeros.
        output_final_history: also return the last W-1 inputs of each document (continuing the history given).

    Returns:
        y_TC: (T, C) in x's dtype.
        final_history_NWC: (n, W-1, C) in x's dtype, or None.

    Raises:
        ValueError: shapes that do not fit one another.

    Differentiable in x, weight and history. No collective, no host sync. Code ours. Twin: reference.py.
    """
    C = x_TC.shape[-1]
    if x_TC.dim() != 2 or weight_C1W.dim() != 3 or tuple(weight_C1W.shape[:2]) != (C, 1):
        raise ValueError(f"short_conv: x {tuple(x_TC.shape)} needs a weight of shape ({C}, 1, taps), got {tuple(weight_C1W.shape)}")
    expected = (cu_seqlens.shape[0] - 1, weight_C1W.shape[-1] - 1, C)
    if history_NWC is not None and tuple(history_NWC.shape) != expected:
        raise ValueError(f"short_conv: history has shape {tuple(history_NWC.shape)}, expected {expected}")
    op = choose(OP, device=x_TC.device.type, dtype=x_TC.dtype, C=C, W=weight_C1W.shape[-1])
    return op(x_TC, weight_C1W, cu_seqlens=cu_seqlens, history_NWC=history_NWC, output_final_history=output_final_history)


def _load():
    from megamoe.ops.short_conv.reference import short_conv

    return short_conv


register(OP, "triton", **triton_backend("megamoe.ops.short_conv.triton", "short_conv"))
register(OP, "reference", load=_load)
