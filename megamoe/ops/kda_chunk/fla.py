"""KDA through flash-linear-attention: the fallback for GPUs other than Hopper, other widths and the unbounded gate.

FLA compiles and autotunes for minutes at the first call of a new head count (237-243 s measured on an H200 with 0.6.0).
"""

from __future__ import annotations

import importlib.util

import torch

from megamoe.ops.kda_chunk import validate


def why_not(*, K=128, device="cuda", dtype=torch.bfloat16, **_) -> str | None:
    """Why FLA cannot serve a call site, in words, or None."""
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed: pip install 'megamoe[gpu]'"
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device here"
    if K > 256:
        return f"it serves key widths up to 256, not K={K}"
    if dtype == torch.float64:
        return "it does not compute in float64"
    return None


def kda_chunk(q_THK, k_THK, v_THV, g_THK, beta_TH, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0,
              scale=None, cu_seqlens=None, initial_state_NHKV=None, output_final_state=False):  # fmt: skip
    """Arguments, results and errors as `megamoe.ops.kda_chunk.kda_chunk`. Twin: reference.py."""
    from fla.ops.kda import chunk_kda

    validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV)
    bounded = gate == "bounded"
    o, final_state = chunk_kda(
        *(x[None] for x in (q_THK, k_THK, v_THV, g_THK, beta_TH)),
        A_log=A_log_H.float(),
        dt_bias=None if dt_bias_HK is None else dt_bias_HK.float().flatten(),
        scale=q_THK.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=None if initial_state_NHKV is None else initial_state_NHKV.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=bounded,
        lower_bound=lower_bound if bounded else None,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    return o[0], final_state if output_final_state else None


def load():
    return kda_chunk
