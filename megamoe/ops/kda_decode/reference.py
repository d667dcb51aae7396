"""The decode step in plain PyTorch: the recurrence written down. fp32 inside (float64 when q is float64), any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.ops.kda_chunk import L2_EPS
from megamoe.ops.kda_decode import validate


@torch.no_grad()
def kda_decode(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0, scale=None, slots_B=None):
    """Arguments, results and errors as `megamoe.ops.kda_decode.kda_decode`; reads `slots_B` on the host."""
    validate(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, A_log_H, dt_bias_HK, gate, lower_bound, slots_B)
    B, wide = q_BHK.shape[0], state_SHKV.dtype
    rows = list(range(B)) if slots_B is None else slots_B.tolist()
    taken = [row for row in rows if row >= 0]
    if len(set(taken)) != len(taken) or any(row >= state_SHKV.shape[0] for row in taken):
        raise ValueError(f"kda_decode: slots {rows} must be different rows of a pool of {state_SHKV.shape[0]}, or negative for none")
    live = torch.tensor([b for b, row in enumerate(rows) if row >= 0], dtype=torch.long, device=q_BHK.device)
    rows = torch.tensor(taken, dtype=torch.long, device=q_BHK.device)
    q, k, v, g, beta = (x[live].to(wide) for x in (q_BHK, k_BHK, v_BHV, g_BHK, beta_BH))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * (q.shape[-1] ** -0.5 if scale is None else scale)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    z, rate = g if dt_bias_HK is None else g + dt_bias_HK.to(wide), A_log_H.to(wide).exp()[:, None]
    log_decay = lower_bound * torch.sigmoid(rate * z) if gate == "bounded" else -rate * F.softplus(z)
    state = log_decay.exp()[..., None] * state_SHKV[rows]
    u = torch.sigmoid(beta)[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * u[..., None, :]
    state_SHKV[rows] = state
    o_BHV = torch.zeros_like(v_BHV, memory_format=torch.contiguous_format)
    o_BHV[live] = torch.einsum("bhkv,bhk->bhv", state, q).to(v_BHV.dtype)
    return o_BHV
