"""From router logits to chosen experts, late weights and the integers that balancing reads: the contract.

Letters: N tokens, E experts, A experts per token, B histogram bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.ops.backends import cuda_backend
from megamoe.ops.registry import choose, register

OP = "moe_route"


class Routed(NamedTuple):
    """What one micro-batch's routing says.

    Attributes:
        idx_NA: int64 in descending biased score, ties to the lower id; -1 in every slot of a padding token.
        weight_NA: fp32 score / (sum + 1e-20) * scale; differentiable in the logits.
        cutoff_N: fp32, the (A+1)-th biased score: the bar every other expert had to clear. The A-th when A = E.
        count_E: int64 slots of real tokens per expert.
        histogram_EB: int32 real tokens per bin of cutoff - score, or None when no bins were asked for.
    """

    idx_NA: torch.Tensor
    weight_NA: torch.Tensor
    cutoff_N: torch.Tensor
    count_E: torch.Tensor
    histogram_EB: torch.Tensor | None


def route(
    logits_NE: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    top_k: int,
    scale: float = 1.0,
    select_on_logits: bool = False,
    token_mask_N: torch.Tensor | None = None,
    bins: int = 0,
) -> Routed:
    """Choose top_k of E experts per token by sigmoid(logits) + bias; weights come from the raw scores.

    Args:
        logits_NE: (N, E) fp32 (float64 in proofs). bias_E: (E,) same dtype; it only selects.
        scale: routed scaling factor of the weights.
        select_on_logits: choose by logits + bias instead (threshold balancing).
        token_mask_N: (N,) bool, False for padding: routed nowhere, counted nowhere.
        bins: B, over [min(bias) - 1, max(bias) + 1]; 0 makes no histogram.

    Raises:
        ValueError: shapes that do not fit, or top_k outside 1 … E.

    No collective, no host sync. Integers only in what is accumulated, so no split of a batch changes a bit of it.
    Source: arXiv:2607.24653 sec. 2.3 and app. D; code ours. Twin: reference.py.
    """
    validate(logits_NE, bias_E, top_k, token_mask_N)
    op = choose(OP, device=logits_NE.device.type, dtype=logits_NE.dtype, E=logits_NE.shape[1], A=top_k, B=bins)
    return op(logits_NE, bias_E, top_k=top_k, scale=scale, select_on_logits=select_on_logits, token_mask_N=token_mask_N, bins=bins)


def validate(logits_NE, bias_E, top_k: int, token_mask_N) -> None:
    """Check the contract without touching the device."""
    if logits_NE.dim() != 2 or tuple(bias_E.shape) != (logits_NE.shape[1],):
        raise ValueError(f"route: logits {tuple(logits_NE.shape)} and bias {tuple(bias_E.shape)} must be (N, E) and (E,)")
    if not 1 <= top_k <= logits_NE.shape[1]:
        raise ValueError(f"route: top_k={top_k} must lie in 1 … {logits_NE.shape[1]}, the number of experts")
    if token_mask_N is not None and (tuple(token_mask_N.shape) != (logits_NE.shape[0],) or token_mask_N.dtype != torch.bool):
        raise ValueError(f"route: token_mask {token_mask_N.dtype} {tuple(token_mask_N.shape)} must be bool ({logits_NE.shape[0]},)")


def _load_reference():
    from megamoe.ops.moe_route.reference import route

    return route


register(OP, "cuda", **cuda_backend("megamoe.ops.moe_route.cuda"))
register(OP, "reference", load=_load_reference)
