"""The largest attention logit of every head: what QK-clip reads. Exact, and apart from the attention backends.

No fused attention at hand returns a row maximum (the log-sum-exp they return exceeds it by up to ln of the row's length,
more than a threshold can bear), so the products are formed once more. Cost: the causal half of Q·T²·H multiply-adds, about 60 % of
the attention core's forward; `optim.qk_clip.every` is the lever.
"""

from __future__ import annotations

import torch

from megamoe.ops.backends import triton_backend
from megamoe.ops.mla_attention import validate
from megamoe.ops.registry import choose, register

OP = "mla_max_logit"


@torch.no_grad()
def max_logit(q_THQ: torch.Tensor, k_THQ: torch.Tensor, *, cu_seqlens: torch.Tensor, scale: float, cu_seqlens_k: torch.Tensor | None = None) -> torch.Tensor:
    """m_h = max over t and s <= t of t's document of scale q_t.k_s.

    Args:
        q_THQ, k_THQ, cu_seqlens, cu_seqlens_k: as for `mla_attention`.
        scale: of the scores, above zero.

    Returns: max_H, (H,) fp32 (float64 for float64 inputs), -inf without a query. No gradient. Products are accumulated in
        that dtype, also of bf16 inputs.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Maxima combine exactly: over blocks, micro-batches, ranks and recomputation, in any order and any number of times. No
    collective. `reference` reads cu_seqlens on the host, `triton` does not. Twin: max_logit_reference.py.
    """
    validate(q_THQ, k_THQ, k_THQ, cu_seqlens, cu_seqlens_k)
    op = choose(OP, device=q_THQ.device.type, dtype=q_THQ.dtype, Q=q_THQ.shape[-1])
    return op(q_THQ, k_THQ, cu_seqlens=cu_seqlens, scale=scale, cu_seqlens_k=cu_seqlens_k)


def _reference():
    from megamoe.ops.mla_attention.max_logit_reference import max_logit

    return max_logit


register(OP, "triton", **triton_backend("megamoe.ops.mla_attention.max_logit_triton", "max_logit"))
register(OP, "reference", load=_reference)
