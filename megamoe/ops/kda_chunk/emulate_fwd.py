"""The roundings of the CUDA forward, step by step, on the CPU: is it the kernel that was meant, or the wrong function?

Follows csrc/kda_chunk/sm90_kda_chunk_fwd.cuh group by group: 16 rows, constant anchor 2^22, norms outside the operands,
bf16 exactly where the kernel stores or feeds bf16, fp32 elsewhere. What it does not imitate: the order of additions inside
a matrix product and the approximate exp2/reciprocal (1-2 ulp of fp32).
"""

from __future__ import annotations

import math

import torch

from megamoe.ops.kda_chunk import L2_EPS, TILE, validate
from megamoe.ops.kda_chunk.reference import document_starts

SHIFT = 22.0
LOG2E = math.log2(math.e)


def kda_chunk(q_THK, k_THK, v_THV, g_THK, beta_TH, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0,
              scale=None, cu_seqlens=None, initial_state_NHKV=None, output_final_state=False, largest=None):  # fmt: skip
    """Arguments and results as `megamoe.ops.kda_chunk.kda_chunk` for the bounded gate; no gradients.

    largest: a dict that receives the largest magnitude of each intermediate that could overflow. (Scores above the diagonal
        may: the kernel selects them away, it does not multiply by zero.)
    """
    T, H, K, V, N = validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV)
    starts = document_starts(cu_seqlens, T)
    scale = K**-0.5 if scale is None else scale
    q, k, v, g, beta_logit = (x.detach().float() for x in (q_THK, k_THK, v_THV, g_THK, beta_TH))
    slope = -LOG2E * A_log_H.detach().float().exp()[:, None]
    bias = 0.0 if dt_bias_HK is None else slope * dt_bias_HK.detach().float()
    out = torch.zeros(T, H, V)
    finals = torch.zeros(N, H, K, V)
    for n in range(N):
        state = torch.zeros(H, K, V) if initial_state_NHKV is None else initial_state_NHKV[n].detach().float().clone()
        state = state * 2.0**-SHIFT
        for start in range(starts[n], starts[n + 1], TILE):
            rows = slice(start, min(start + TILE, starts[n + 1]))
            args = (x[rows].transpose(0, 1) for x in (q, k, v, g * slope + bias))
            out[rows], state = _group(*args, beta_logit[rows].T, state, lower_bound * LOG2E, scale, largest)
        finals[n] = state * 2.0**SHIFT
    return out.to(v_THV.dtype), finals if output_final_state else None


def _bf16(x):
    return x.bfloat16().float()


def _group(q, k, v, negated_logit2, beta_logit, state, bound2, scale, largest):
    """One group: (H, rows, ·) inputs and the scaled state (H, K, V); returns o (rows, H, V) and the next state."""
    rows = q.shape[1]
    G = SHIFT + (bound2 / (1.0 + torch.exp2(negated_logit2))).cumsum(1)
    left, right = torch.exp2(G), torch.exp2(-G)
    k_left, q_left, k_right = _bf16(k * left), _bf16(q * left), _bf16(k * right)
    rk = (k.square().sum(-1) + L2_EPS).rsqrt()
    rq = (q.square().sum(-1) + L2_EPS).rsqrt() * scale
    beta = 1.0 / (1.0 + torch.exp2(-LOG2E * beta_logit))
    kk, qk = k_left @ k_right.transpose(1, 2), q_left @ k_right.transpose(1, 2)
    L = ((beta * rk)[:, :, None] * rk[:, None, :] * kk).tril(-1)
    identity = torch.eye(rows).expand(L.shape[0], rows, rows)
    inverse = torch.linalg.solve_triangular(L, identity, upper=False, unitriangular=True)
    Z = _bf16(rk[:, :, None] * beta[:, None, :] * inverse)
    state_operand = _bf16(state)
    residual = _bf16(v - rk[:, :, None] * (k_left @ state_operand))
    u = _bf16(Z @ residual)
    o = rq[:, :, None] * (q_left @ state_operand + _bf16(qk.tril()) @ u)
    grown = state + k_right.transpose(1, 2) @ u
    if largest is not None:
        for name, x in dict(left=left, right=right, k_right=k_right, scores=kk.tril(), state=grown).items():
            largest[name] = max(largest.get(name, 0.0), x.abs().max().item())
    return o.transpose(0, 1), torch.exp2(G[:, -1:] - SHIFT).transpose(1, 2) * grown
