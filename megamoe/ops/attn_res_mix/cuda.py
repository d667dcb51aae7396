"""The mix on Hopper: the Python side of csrc/attn_res_mix. Each row crosses the memory bus once forward and once backward.

Backward keeps the rows by reference and two fp32 numbers per row and token. Deterministic, capturable, no host sync.
"""

from __future__ import annotations

import importlib.util

import torch

from megamoe.ops.attn_res_mix import lean

MAX_ROWS, RING_BYTES, MAX_SLOTS, MAX_WIDTH = 16, 216 * 1024, 32, 10752  # of csrc/attn_res_mix


def why_not(*, device="cuda", dtype=torch.bfloat16, D=8, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "tensors are not on a GPU" if device != "cuda" else "no CUDA device here"
    if dtype != torch.bfloat16:
        return f"it reads bf16 rows, not {dtype}"
    if D % 8 or D > MAX_WIDTH:
        return f"takes widths that are multiples of 8 up to {MAX_WIDTH}, got {D}"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"it is built for Hopper (sm_90), not sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    if importlib.util.find_spec("megamoe._C") is None:
        return "the CUDA extension is not built: pip install -e . --no-build-isolation with nvcc 13"
    return None


def most_rows(D: int) -> int:
    """How many rows of a token fit on an SM at once, beside the upstream gradient: 14 of 7168."""
    slots = min(MAX_SLOTS, RING_BYTES // (-(-D * 2 // 128) * 128))
    return min(MAX_ROWS, slots - 1)


def attn_res_mix(rows, query_D, norm_weight_D, *, eps=1e-5):
    """See the contract in `megamoe.ops.attn_res_mix`. More rows than `most_rows` are computed one by one: their number is no
    fact of the call site, it grows along the model."""
    if len(rows) > most_rows(rows[0].shape[1]):
        return lean.attn_res_mix(rows, query_D, norm_weight_D, eps=eps)
    return _Mix.apply(eps, query_D, norm_weight_D, *rows)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, query_D, norm_weight_D, *rows):
        rows = [row.contiguous() for row in rows]
        u_D = query_D.float() * norm_weight_D.float()
        out_TD, rv_2nT = torch.ops.megamoe.attn_res_mix_fwd(rows, u_D, eps)
        ctx.save_for_backward(query_D, norm_weight_D, u_D, rv_2nT, *rows)
        return out_TD

    @staticmethod
    def backward(ctx, do_TD):
        query_D, norm_weight_D, u_D, rv_2nT, *rows = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        drows, du_D = torch.ops.megamoe.attn_res_mix_bwd(do_TD.contiguous(), rows, u_D, rv_2nT, sum(1 << i for i, want in enumerate(wanted) if want))
        dquery_D = (du_D * norm_weight_D.float()).to(query_D.dtype)
        dnorm_weight_D = (du_D * query_D.float()).to(norm_weight_D.dtype)
        return None, dquery_D, dnorm_weight_D, *(d if want else None for d, want in zip(drows, wanted))


def load():
    """Load the extension and return the callable."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    return attn_res_mix
