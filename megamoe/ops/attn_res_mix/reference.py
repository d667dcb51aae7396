"""The mix as it is written, differentiated by autograd. Stacks the rows in fp32: obvious, and hungry."""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide


def attn_res_mix(rows, query_D, norm_weight_D, *, eps=1e-5):
    """See the contract in `megamoe.ops.attn_res_mix`."""
    dtype = wide(rows[0].dtype)
    v_iTD = torch.stack(list(rows)).to(dtype)
    k_iTD = v_iTD * (v_iTD.square().mean(-1, keepdim=True) + eps).rsqrt()
    s_iT = (k_iTD * norm_weight_D.to(dtype) * query_D.to(dtype)).sum(-1)
    p_iT = torch.softmax(s_iT, 0)
    return (p_iT[..., None] * v_iTD).sum(0).to(rows[0].dtype)
