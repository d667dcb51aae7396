"""RMSNorm over the last dim, and its gated form behind KDA. One backend today; the contract is where fused ones go."""

from __future__ import annotations

import torch

from megamoe.ops.backends import triton_backend
from megamoe.ops.registry import choose, register

OP = "rms_norm"
GATED_OP = "gated_rms_norm"


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) in fp32, cast to x's dtype, then times the weight in that dtype.

    The cast before the weight is the released model's order; it is visible in bf16.

    Args:
        x: (..., D) floating. weight_D: (D,).
        eps: added to the mean of squares.

    Returns: (..., D) in x's dtype.

    Raises:
        ValueError: the weight's width is not x's.

    No collective, no host sync. Source: arXiv:1910.07467; code ours. Twin: reference.py.
    """
    _validate(x, weight_D)
    return choose(OP, device=x.device.type, dtype=x.dtype, D=x.shape[-1])(x, weight_D, eps=eps)


def gated_rms_norm(x: torch.Tensor, weight_D: torch.Tensor, gate: torch.Tensor, *, eps: float) -> torch.Tensor:
    """sigmoid(gate) * (x * rsqrt(mean(x^2) + eps)) * weight, all in fp32, cast once to the gate's dtype.

    Args:
        x: (..., D), any float dtype (the attention core may hand over fp32). weight_D: (D,).
        gate: (..., D) logits.

    Returns: (..., D) in the gate's dtype, the dtype of the activations around.

    Raises:
        ValueError: shapes do not match.
    """
    _validate(x, weight_D)
    if gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate has shape {tuple(gate.shape)}, expected {tuple(x.shape)}")
    return choose(GATED_OP, device=x.device.type, dtype=x.dtype, D=x.shape[-1])(x, weight_D, gate, eps=eps)


def _validate(x: torch.Tensor, weight_D: torch.Tensor) -> None:
    if weight_D.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight has shape {tuple(weight_D.shape)}, expected {tuple(x.shape[-1:])}")


def _load(name: str):
    from megamoe.ops.rms_norm import reference

    return getattr(reference, name)


register(OP, "triton", **triton_backend("megamoe.ops.rms_norm.triton", "rms_norm"))
register(OP, "reference", load=lambda: _load("rms_norm"))
register(GATED_OP, "triton", **triton_backend("megamoe.ops.rms_norm.triton", "gated_rms_norm"))
register(GATED_OP, "reference", load=lambda: _load("gated_rms_norm"))
