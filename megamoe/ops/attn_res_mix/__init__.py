"""Attention over depth: a sublayer's input as a softmax-weighted sum of earlier rows (Attention Residuals)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.ops.backends import cuda_backend, triton_backend
from megamoe.ops.registry import choose, register

OP = "attn_res_mix"


def attn_res_mix(rows: Sequence[torch.Tensor], query_D: torch.Tensor, norm_weight_D: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """Mix the rows of each token by one learned pseudo-query.

        v_i = rows_i in fp32;  k_i = v_i rsqrt(mean(v_i^2) + eps)
        s_i = sum_c k_ic norm_weight_c query_c;   p = softmax_i(s);   out = sum_i p_i v_i

    Keys are normalised, values are raw; there is no 1/sqrt(D). A zero query gives the mean of the rows.

    Args:
        rows: one or more (T, D) tensors of one dtype: bank rows in the order they were written, then the running sum.
            They are kept by reference, never concatenated, so that a row shared by many mixes is stored once.
        query_D, norm_weight_D: (D,) any float dtype, used in fp32.

    Returns: (T, D) in the rows' dtype. fp32 inside, float64 for float64 rows.

    Raises:
        ValueError: no rows, or shapes that differ.

    Backward keeps the rows and three numbers per row and token; everything wide is recomputed.
    No collective, no host sync. Source: arXiv:2603.15031, arXiv:2607.24653 sec. 2.2; code ours.
    Twins: reference.py (plain autograd), two_phase.py (block statistics first, for inference).
    """
    validate(rows, query_D, norm_weight_D)
    op = choose(OP, device=rows[0].device.type, dtype=rows[0].dtype, D=rows[0].shape[-1])
    return op(rows, query_D, norm_weight_D, eps=eps)


def validate(rows: Sequence[torch.Tensor], query_D: torch.Tensor, norm_weight_D: torch.Tensor) -> None:
    """Check the contract above; used by the public function and by tests of backends."""
    if not rows:
        raise ValueError("attn_res_mix: no rows; give the running sum at least")
    shape = tuple(rows[0].shape)
    for i, row in enumerate(rows):
        if tuple(row.shape) != shape or row.dtype != rows[0].dtype:
            raise ValueError(f"attn_res_mix: row {i} is {row.dtype} {tuple(row.shape)}, expected {rows[0].dtype} {shape}")
    for name, vector in (("query", query_D), ("norm_weight", norm_weight_D)):
        if tuple(vector.shape) != shape[-1:]:
            raise ValueError(f"attn_res_mix: {name} has shape {tuple(vector.shape)}, expected {shape[-1:]}")


def _load_lean():
    from megamoe.ops.attn_res_mix.lean import attn_res_mix

    return attn_res_mix


def _load_reference():
    from megamoe.ops.attn_res_mix.reference import attn_res_mix

    return attn_res_mix


register(OP, "cuda", **cuda_backend("megamoe.ops.attn_res_mix.cuda"))
register(OP, "triton", **triton_backend("megamoe.ops.attn_res_mix.triton", "attn_res_mix"))
register(OP, "lean", load=_load_lean)
register(OP, "reference", load=_load_reference)
