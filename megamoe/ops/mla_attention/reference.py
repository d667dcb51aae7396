"""Attention written out, document by document: scores, mask, softmax in fp32, sum. Keeps every score."""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide


def mla_attention(q_THQ, k_THQ, v_THV, *, cu_seqlens, scale, max_seqlen=None, cu_seqlens_k=None):
    """See the contract in `megamoe.ops.mla_attention`."""
    dtype = wide(q_THQ.dtype)
    lengths = cu_seqlens.diff().tolist()
    key_lengths = lengths if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
    outs = [v_THV.new_zeros(0, *v_THV.shape[1:], dtype=dtype)]
    for q, k, v in zip(q_THQ.split(lengths), k_THQ.split(key_lengths), v_THV.split(key_lengths)):
        score_Hts = torch.einsum("thq,shq->hts", q.to(dtype), k.to(dtype)) * scale
        future = torch.ones(score_Hts.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
        p_Hts = torch.softmax(score_Hts.masked_fill(future, float("-inf")), -1)
        outs.append(torch.einsum("hts,shv->thv", p_Hts, v.to(dtype)))
    return torch.cat(outs)
