"""All documents in one call of torch's variable-length attention; no host sync.

The kernel takes one head width, so values are padded to the keys' width, and it rounds its output to bf16: the fp32 the
contract promises holds that rounded value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn


def mla_attention(q_THQ, k_THQ, v_THV, *, cu_seqlens, scale, max_seqlen=None, cu_seqlens_k=None):
    """See the contract in `megamoe.ops.mla_attention`. bf16 or fp16 on a GPU."""
    V, longest = v_THV.shape[-1], max_seqlen or k_THQ.shape[0]
    v_THQ = F.pad(v_THV, (0, q_THQ.shape[-1] - V)) if V < q_THQ.shape[-1] else v_THV
    o_THQ = _call(q_THQ, k_THQ, v_THQ, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, longest, scale)
    return o_THQ[..., :V].float()


def _call(q, k, v, cu_seqlens, cu_seqlens_k, longest, scale):
    # torch 2.11 names causality by a window (look back without limit, ahead not at all); 2.10 by a flag.
    try:
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens_k, longest, longest, scale=scale, window_size=(-1, 0))
    except TypeError:
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens_k, longest, longest, is_causal=True, scale=scale)
