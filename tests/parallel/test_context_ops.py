"""Attention for a part of a document's queries. Why it matters: context parallelism asks every layer for such parts; an
off-by-one in the causal border leaks one token of the future. Not covered: `varlen` (needs a GPU).
"""

from __future__ import annotations

import pytest
import torch

from megamoe.ops.mla_attention.reference import mla_attention as reference
from megamoe.ops.mla_attention.sdpa import mla_attention as sdpa


@pytest.mark.parametrize("op", [reference, sdpa], ids=["reference", "sdpa"])
def test_the_last_queries_of_each_document_equal_the_whole(op):
    torch.manual_seed(1)
    lengths, kept = [5, 0, 7, 3, 4, 6], [2, 0, 7, 0, 1, 6]
    T, H, Q, V = sum(lengths), 2, 6, 4
    q, k, v = (torch.randn(T, H, w, dtype=torch.float64) for w in (Q, Q, V))
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = torch.cat([torch.arange(int(end) - n, int(end)) for end, n in zip(cu[1:], kept)])
    whole = reference(*leaves, cu_seqlens=cu, scale=0.4)[rows]
    whole.square().sum().backward()
    parts = [x.clone().requires_grad_() for x in (q, k, v)]
    cu_q = torch.tensor([0, *kept], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    part = op(parts[0][rows], parts[1], parts[2], cu_seqlens=cu_q, cu_seqlens_k=cu, scale=0.4)
    part.square().sum().backward()
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-13)
    for a, b in zip(parts, leaves):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)
