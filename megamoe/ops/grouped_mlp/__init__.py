"""Many gated MLPs, each over its own consecutive rows: what the experts of a rank compute."""

from __future__ import annotations

import torch

from megamoe.ops import mxfp4
from megamoe.ops.backends import triton_backend
from megamoe.ops.registry import choose, register
from megamoe.ops.situ_glu import validate_act

OP = "grouped_mlp"


def grouped_mlp(
    rows_RD: torch.Tensor,
    count_e: torch.Tensor,
    w_gate_eFD: torch.Tensor,
    w_up_eFD: torch.Tensor,
    w_down_eDF: torch.Tensor,
    *,
    act: str,
    act_beta: float = 4.0,
    act_linear_beta: float = 25.0,
    mxfp8_hidden: bool = False,
) -> torch.Tensor:
    """out = act(rows W_gate^T, rows W_up^T) W_down^T, expert by expert.

    Args:
        rows_RD: (R, D), the rows of expert 0, then of expert 1, …
        count_e: (e,) int32, rows of each expert, zero allowed. May sum to less than R.
        w_gate_eFD, w_up_eFD: (e, F, D); w_down_eDF: (e, D, F). Same dtype as the rows.
        act, act_beta, act_linear_beta: see `megamoe.ops.situ_glu`.
        mxfp8_hidden: round what enters the second product to MXFP8, straight-through (`ops/mxfp4`); F a multiple of 32. The
            other operands, rows and weights, are the caller's to round: it can do so once for many uses.

    Returns:
        out_RD: (R, D) in the rows' dtype; zero in rows past the sum of the counts.

    Raises:
        ValueError: shapes or dtypes that do not fit, unknown activation.

    An expert without rows gets exact zero gradients, also when R = 0.
    No collective. `reference` syncs the host once to read the counts, `grouped_mm` never. Twin: reference.py.
    """
    validate(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, act)
    if mxfp8_hidden and w_gate_eFD.shape[1] % mxfp4.GROUP:
        raise ValueError(f"grouped_mlp: mxfp8_hidden needs an expert width that is a multiple of {mxfp4.GROUP}, got {w_gate_eFD.shape[1]}")
    op = choose(OP, device=rows_RD.device.type, dtype=rows_RD.dtype, D=rows_RD.shape[1], F=w_gate_eFD.shape[1])
    return op(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, act=act, act_beta=act_beta, act_linear_beta=act_linear_beta, mxfp8_hidden=mxfp8_hidden)


def validate(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, act: str) -> None:
    """Check the contract without touching the device."""
    validate_act(act)
    e, F, D = w_gate_eFD.shape
    if rows_RD.dim() != 2 or rows_RD.shape[1] != D:
        raise ValueError(f"grouped_mlp: rows {tuple(rows_RD.shape)} do not fit w_gate {tuple(w_gate_eFD.shape)}: expected (R, {D})")
    for name, tensor, shape in (("w_up", w_up_eFD, (e, F, D)), ("w_down", w_down_eDF, (e, D, F)), ("count", count_e, (e,))):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"grouped_mlp: {name} has shape {tuple(tensor.shape)}, expected {shape}")
    if any(w.dtype != rows_RD.dtype for w in (w_gate_eFD, w_up_eFD, w_down_eDF)):
        raise ValueError(f"grouped_mlp: rows are {rows_RD.dtype}, weights {w_gate_eFD.dtype}: cast them to one dtype")


def _why_not_grouped_mm(*, device: str, dtype: torch.dtype, D: int, F: int, **_) -> str | None:
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype != torch.bfloat16:
        return f"takes bfloat16, got {dtype}"
    if D % 8 or F % 8:
        return f"widths must be multiples of 8 (16-byte rows), got {D} and {F}"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or newer"
    return None if hasattr(torch.nn.functional, "grouped_mm") else "this torch has no grouped_mm"


def _load_grouped_mm():
    from megamoe.ops.grouped_mlp.grouped_mm import grouped_mlp

    return grouped_mlp


def _load_reference():
    from megamoe.ops.grouped_mlp.reference import grouped_mlp

    return grouped_mlp


register(OP, "triton", **triton_backend("megamoe.ops.grouped_mlp.triton", "grouped_mlp"))
register(OP, "grouped_mm", load=_load_grouped_mm, why_not=_why_not_grouped_mm)
register(OP, "reference", load=_load_reference)
