"""Causal softmax attention inside each document of a packed stream, query/key width apart from value width."""

from __future__ import annotations

import torch

from megamoe.ops.registry import choose, register

OP = "mla_attention"


def mla_attention(
    q_THQ: torch.Tensor,
    k_THQ: torch.Tensor,
    v_THV: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    scale: float,
    max_seqlen: int | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """o_t = sum over s <= t of t's document of softmax_s(scale q_t.k_s) v_s, per head.

    Args:
        q_THQ, k_THQ: (T, H, Q) one float dtype; v_THV: (T, H, V).
        cu_seqlens: (n+1,) int32 document starts; empty documents allowed.
        cu_seqlens_k: document starts of the keys and values, (n+1,) int32, when they reach further back than the queries:
            the queries of a document are its last ones, so a document has at least as many keys. None: the same as
            `cu_seqlens`. Context parallelism asks for part of a document's queries this way.
        scale: of the scores; the caller's, because YaRN changes it.
        max_seqlen: an upper bound of the longest document, for kernels that size their grid by it. None means T.

    Returns:
        o_THV: (T, H, V) in fp32 (float64 for float64 inputs): the gate behind it reads it unrounded. A backend whose
            kernel rounds to bf16 first says so.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    No collective. `reference` and `sdpa` read cu_seqlens on the host, `varlen` does not. Twin: reference.py.
    """
    validate(q_THQ, k_THQ, v_THV, cu_seqlens, cu_seqlens_k)
    op = choose(OP, device=q_THQ.device.type, dtype=q_THQ.dtype, Q=q_THQ.shape[-1], V=v_THV.shape[-1])
    return op(q_THQ, k_THQ, v_THV, cu_seqlens=cu_seqlens, scale=scale, max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens_k)


def validate(q_THQ, k_THQ, v_THV, cu_seqlens, cu_seqlens_k=None) -> None:
    """Check the contract without touching the device."""
    keys = k_THQ.shape[0] if cu_seqlens_k is not None and k_THQ.dim() == 3 else q_THQ.shape[0]
    if q_THQ.dim() != 3 or tuple(k_THQ.shape) != (keys, *q_THQ.shape[1:]) or tuple(v_THV.shape[:2]) != (keys, q_THQ.shape[1]):
        raise ValueError(f"mla_attention: q {tuple(q_THQ.shape)}, k {tuple(k_THQ.shape)}, v {tuple(v_THV.shape)} must be (T, H, Q), (T, H, Q), (T, H, V)")
    if k_THQ.dtype != q_THQ.dtype or v_THV.dtype != q_THQ.dtype:
        raise ValueError(f"mla_attention: q {q_THQ.dtype}, k {k_THQ.dtype}, v {v_THV.dtype} must have one dtype")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"mla_attention: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected int32 (n+1,)")
    if cu_seqlens_k is not None and (cu_seqlens_k.dtype != torch.int32 or cu_seqlens_k.shape != cu_seqlens.shape):
        raise ValueError(f"mla_attention: cu_seqlens_k is {cu_seqlens_k.dtype} {tuple(cu_seqlens_k.shape)}, expected int32 {tuple(cu_seqlens.shape)} like cu_seqlens")


def _why_not_varlen(*, device: str, dtype: torch.dtype, Q: int, V: int, **_) -> str | None:
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, got {dtype}"
    if max(Q, V) > 256 or Q % 8 or V > Q:
        return f"head widths must be multiples of 8, at most 256, values no wider than keys; got {Q} and {V}"
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return "this torch has no torch.nn.attention.varlen"
    return None


def _load(name: str):
    import importlib

    return importlib.import_module(f"megamoe.ops.mla_attention.{name}").mla_attention


register(OP, "varlen", load=lambda: _load("varlen"), why_not=_why_not_varlen)
register(OP, "sdpa", load=lambda: _load("sdpa"))
register(OP, "reference", load=lambda: _load("reference"))
