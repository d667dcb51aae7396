"""The decode step as one kernel: the Python side of csrc/kda_decode. bf16 in and out, fp32 states updated in place."""

from __future__ import annotations

import torch

from megamoe.ops.kda_chunk import cuda as chunk
from megamoe.ops.kda_decode import validate


def why_not(*, training=False, **facts) -> str | None:
    """Why this kernel cannot serve a call site, in words, or None."""
    if training:
        return "it has no backward: decode under torch.no_grad()"
    return chunk.why_not(**facts)


@torch.no_grad()
def kda_decode(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0, scale=None, slots_B=None):
    """Arguments, results and errors as `megamoe.ops.kda_decode.kda_decode`; K = V = 128, bf16 q, k, v, g, β bf16 or fp32, the bounded
    gate. Strided views are read as they are where rows are 16-byte aligned. Twin: reference.py."""
    validate(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, A_log_H, dt_bias_HK, gate, lower_bound, slots_B)
    reason = chunk.refusal(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, gate)
    if reason:
        raise ValueError(f"kda_decode: {reason}")
    return torch.ops.megamoe.kda_decode(
        *(chunk.aligned(x) for x in (q_BHK, k_BHK, v_BHV, g_BHK)),
        beta_BH,
        state_SHKV,
        A_log_H.float().contiguous(),
        None if dt_bias_HK is None else dt_bias_HK.float().contiguous(),
        slots_B,
        lower_bound,
        q_BHK.shape[-1] ** -0.5 if scale is None else scale,
    )


def load():
    """Load the extension, give the op its fake, and return the callable. Once per process."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    if not getattr(load, "done", False):
        torch.library.register_fake("megamoe::kda_decode", lambda q, k, v, *_: v.new_empty(v.shape))
        load.done = True
    return kda_decode
