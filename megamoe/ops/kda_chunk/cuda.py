"""KDA on Hopper: the Python side of csrc/kda_chunk. Same signature and results as reference.py, bf16 in and out.

Backward keeps the raw inputs only (q, k, v, g, β and the small parameters: 1,026 bytes a token and head); everything else is
recomputed there. Both directions are deterministic, capturable in a CUDA graph and free of host syncs and autotuning.
"""

from __future__ import annotations

import importlib.util

import torch

from megamoe.ops.kda_chunk import validate

WIDTH = 128  # K = V of the kernels


def why_not(*, K=WIDTH, V=WIDTH, gate="bounded", device="cuda", dtype=torch.bfloat16, training=False, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if (K, V) != (WIDTH, WIDTH):
        return f"its kernels are built for head width {WIDTH}, not K={K}, V={V}"
    if gate != "bounded":
        return f"its 16-row tiles need the bounded gate, not {gate!r}"
    if dtype != torch.bfloat16:
        return f"it computes in bf16, not {dtype}"
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device here"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"it is built for Hopper (sm_90), not sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    if importlib.util.find_spec("megamoe._C") is None:
        return "the CUDA extension is not built: pip install -e . --no-build-isolation with nvcc 13"
    return None


def kda_chunk(q_THK, k_THK, v_THV, g_THK, beta_TH, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0,
              scale=None, cu_seqlens=None, initial_state_NHKV=None, output_final_state=False):  # fmt: skip
    """Arguments, results and errors as `megamoe.ops.kda_chunk.kda_chunk`; K = V = 128, bf16 q, k, v, g, β bf16 or fp32.

    cu_seqlens is read on the device and not checked: it must rise from 0 to T. Inputs may be strided views (a copy is made
    where the last dimension is not contiguous or rows are not 16-byte aligned). Twin: reference.py.
    """
    _, _, K, _, _ = validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV)
    reason = refusal(q_THK, k_THK, v_THV, g_THK, beta_TH, gate)
    if reason:
        raise ValueError(f"kda_chunk: {reason}")
    tensors = (
        *(aligned(x) for x in (q_THK, k_THK, v_THV, g_THK)),
        beta_TH,
        A_log_H.float().contiguous(),
        None if dt_bias_HK is None else _vectors(dt_bias_HK.float().contiguous()),
        None if initial_state_NHKV is None else initial_state_NHKV.float().contiguous(),
        cu_seqlens,
    )
    options = (lower_bound, K**-0.5 if scale is None else scale, output_final_state)
    if torch.is_grad_enabled():
        o_THV, final_state_NHKV = _KDA.apply(options, *tensors)
    else:
        o_THV, final_state_NHKV = torch.ops.megamoe.kda_chunk_fwd(*tensors, *options)
    return o_THV, final_state_NHKV if output_final_state else None


def refusal(q, k, v, g, beta, gate) -> str | None:
    """Why the kernels cannot take these tensors, and the way out, or None."""
    if (q.shape[-1], v.shape[-1]) != (WIDTH, WIDTH):
        return f"K={q.shape[-1]}, V={v.shape[-1]} is not served by the cuda backend (width {WIDTH} only); use backend 'reference'"
    if gate != "bounded":
        return f"gate={gate!r} is not served by the cuda backend ('bounded' only); use backend 'reference'"
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        if x.dtype != torch.bfloat16:
            return f"{name} is {x.dtype}, the cuda backend takes bfloat16: cast it, or use backend 'reference'"
    if beta.dtype not in (torch.bfloat16, torch.float32):
        return f"beta is {beta.dtype}, the cuda backend takes bfloat16 or float32: cast it"
    return None


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself where the kernels can read its rows, else a contiguous copy."""
    rows = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.storage_offset() % 8 == 0
    return x if rows else x.contiguous()


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """x, an fp32 tensor, where 16-byte reads can start at it: a parameter inside a flat buffer may lie off their boundary."""
    return x if x.storage_offset() % 4 == 0 else x.clone()


def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, lower_bound, scale, output_final_state):
    T, H, W = q.shape
    N = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(T, H, W), q.new_empty((N, H, W, W) if output_final_state else (0,), dtype=torch.float32)


def _backward_fake(d_o, d_final_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, lower_bound, scale):
    def like(x):
        return q.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape)

    return tuple(like(x) for x in (q, k, v, g, beta, A_log, dt_bias, initial_state))


class _KDA(torch.autograd.Function):
    """Autograd of the two ops. Not `torch.library.register_autograd`: its Python costs a call some 50 us more of host time."""

    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        o_THV, final_state_NHKV = torch.ops.megamoe.kda_chunk_fwd(*tensors, *options)
        if not options[-1]:
            ctx.mark_non_differentiable(final_state_NHKV)
        return o_THV, final_state_NHKV

    @staticmethod
    def backward(ctx, d_o, d_final_state):
        tensors = ctx.saved_tensors
        v, dt_bias, initial_state = tensors[2], tensors[6], tensors[7]
        if d_o is None:
            d_o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        lower_bound, scale, output_final_state = ctx.options
        d_final_state = d_final_state.contiguous() if d_final_state is not None and output_final_state else None
        grads = torch.ops.megamoe.kda_chunk_bwd(aligned(d_o), d_final_state, *tensors, lower_bound, scale)
        return None, *grads[:6], None if dt_bias is None else grads[6], None if initial_state is None else grads[7], None


def load():
    """Load the extension, give its ops their fakes, and return the callable. Once per process."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    if not getattr(load, "done", False):
        torch.library.register_fake("megamoe::kda_chunk_fwd", _forward_fake)
        torch.library.register_fake("megamoe::kda_chunk_bwd", _backward_fake)
        load.done = True
    return kda_chunk
