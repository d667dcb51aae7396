"""The scores formed once more, block by block, and only their maxima kept: exact, in bounded memory, on any device."""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide

BLOCK_SCORES = 1 << 24


def max_logit(q_THQ, k_THQ, *, cu_seqlens, scale, cu_seqlens_k=None, block_scores: int = BLOCK_SCORES):
    """See the contract in `max_logit.py`. `block_scores`: scores that exist at a time, over all heads (at least one query's row).

    Reads cu_seqlens on the host. On a GPU the scores are written and read once, which costs several times the fused core.
    """
    dtype = wide(q_THQ.dtype)
    H = q_THQ.shape[1]
    max_H = q_THQ.new_full((H,), float("-inf"), dtype=dtype)
    lengths = cu_seqlens.diff().tolist()
    key_lengths = lengths if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
    q_HTQ, k_HQT = q_THQ.detach().transpose(0, 1), k_THQ.detach().permute(1, 2, 0)
    first_q = first_k = 0
    for queries, keys in zip(lengths, key_lengths):
        begin = 0
        while begin < queries:
            rows = min(queries - begin, max(1, block_scores // (H * keys)))
            # The queries are the document's last ones; the block's last query sees `seen` keys, its first one rows-1 fewer.
            seen = keys - queries + begin + rows
            score_Hts = _product(q_HTQ[:, first_q + begin : first_q + begin + rows], k_HQT[:, :, first_k : first_k + seen], dtype)
            future_ts = torch.ones(rows, seen, dtype=torch.bool, device=q_THQ.device).triu(1 + seen - rows)
            top_H = score_Hts.masked_fill_(future_ts, float("-inf")).amax((-2, -1))
            max_H = torch.maximum(max_H, top_H * scale)
            begin += rows
        first_q, first_k = first_q + queries, first_k + keys
    return max_H


def _product(q_HtQ: torch.Tensor, k_HQs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores in `dtype`. On a GPU bf16 operands go to the tensor cores and come out unrounded."""
    if q_HtQ.is_cuda and q_HtQ.dtype != dtype:
        return torch.bmm(q_HtQ, k_HQs, out_dtype=dtype)
    return torch.bmm(q_HtQ.to(dtype), k_HQs.to(dtype))
