"""The mix in two phases: statistics of the finished rows once per block, then one cheap merge per sublayer.

All pseudo-queries of a block are parameters, known before the block runs, and the bank does not change while it runs.
So phase 1 reads the bank once for every query of the block, and phase 2 only adds the running sum, by online softmax:

    M = max(m, s);   out = (o e^(m-M) + prefix e^(s-M)) / (l e^(m-M) + e^(s-M))

For inference and as the shape of a fused kernel; training uses the mix itself. Source: arXiv:2603.15031; code ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megamoe.ops.precision import wide


class BankStats(NamedTuple):
    """What Q queries know about the finished rows.

    Attributes:
        o_QTD: (Q, T, D) un-normalised weighted sum of the rows, relative to m.
        m_QT, l_QT: (Q, T) largest score, and the sum of exp(score - m).
    """

    o_QTD: torch.Tensor
    m_QT: torch.Tensor
    l_QT: torch.Tensor


def bank_stats(rows: Sequence[torch.Tensor], query_QD: torch.Tensor, norm_weight_QD: torch.Tensor, *, eps: float = 1e-5) -> BankStats:
    """Phase 1: every query of a block against the bank. Rows as in `attn_res_mix`, at least one. fp32 inside."""
    dtype = wide(rows[0].dtype)
    u_QD = query_QD.to(dtype) * norm_weight_QD.to(dtype)
    m_QT = l_QT = o_QTD = None
    for row in rows:
        v_TD = row.to(dtype)
        s_QT = _score(v_TD, u_QD, eps)
        if m_QT is None:
            m_QT, l_QT, o_QTD = s_QT, torch.ones_like(s_QT), v_TD.expand(u_QD.shape[0], -1, -1)
            continue
        top_QT = torch.maximum(m_QT, s_QT)
        keep, add = (m_QT - top_QT).exp(), (s_QT - top_QT).exp()
        o_QTD = o_QTD * keep[..., None] + v_TD * add[..., None]
        m_QT, l_QT = top_QT, l_QT * keep + add
    return BankStats(o_QTD, m_QT, l_QT)


def merge(stats: BankStats, q: int, prefix_TD: torch.Tensor, query_D: torch.Tensor, norm_weight_D: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """Phase 2: query `q` of the block, with the running sum as one more row. Returns (T, D) in the sum's dtype."""
    v_TD = prefix_TD.to(stats.o_QTD.dtype)
    s_T = _score(v_TD, (query_D.to(v_TD.dtype) * norm_weight_D.to(v_TD.dtype))[None], eps)[0]
    o_TD, m_T, l_T = (x[q] for x in stats)
    top_T = torch.maximum(m_T, s_T)
    keep, add = (m_T - top_T).exp(), (s_T - top_T).exp()
    return ((o_TD * keep[:, None] + v_TD * add[:, None]) / (l_T * keep + add)[:, None]).to(prefix_TD.dtype)


def _score(v_TD, u_QD, eps):
    return (u_QD @ v_TD.t()) * (v_TD.square().mean(-1) + eps).rsqrt()
