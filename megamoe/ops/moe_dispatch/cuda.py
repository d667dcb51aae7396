"""Dispatch and combine on the GPU: the Python side of csrc/moe_dispatch.

Slots come from prefix sums on the device; a token's row is read once and written to all its slots; combine reads each
expert output once and sums in fp32 in ascending expert id, so results equal the reference's order and any layout of experts
over ranks. Without a group nothing syncs the host. With one, rows travel as in reference.py (all_to_all_single), packed and
summed by these kernels; kernels that write straight to peers take the same tables (`virtual.py` plays all ranks in one process).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megamoe.ops.moe_dispatch import reference

MAX_EXPERTS, MAX_SLOTS_PER_TOKEN = 4096, 32  # of csrc/moe_dispatch


def why_not(*, device="cuda", dtype=torch.bfloat16, D=8, E=1, A=1, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "tensors are not on a GPU" if device != "cuda" else "no CUDA device here"
    if dtype != torch.bfloat16 or D % 8:
        return f"it moves bf16 rows of a multiple of 8, not {dtype} of {D}"
    if E > MAX_EXPERTS or A > MAX_SLOTS_PER_TOKEN:
        return f"takes at most {MAX_EXPERTS} experts and {MAX_SLOTS_PER_TOKEN} slots a token, got {E} and {A}"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is built for Hopper (sm_90)"
    if importlib.util.find_spec("megamoe._C") is None:
        return "the CUDA extension is not built: pip install -e . --no-build-isolation with nvcc 13"
    return None


@dataclass
class Slots:
    """Where the slots of N tokens are, sorted by expert id within a token: what `place` of csrc/moe_dispatch returns.

    Attributes:
        row_NA, owner_NA: int32 row at the owning rank (-1: empty) and uint8 rank.
        weight_NA: late weights in the same order, outside the autograd graph.
        source_NA: uint8 column of the slot in topk_idx.
        received: (1,) int32 rows in use on this rank.
    """

    row_NA: torch.Tensor
    owner_NA: torch.Tensor
    weight_NA: torch.Tensor
    source_NA: torch.Tensor
    received: torch.Tensor


def place(topk_idx_NA, topk_weight_NA, num_experts: int) -> tuple[Slots, torch.Tensor]:
    """Slots of this rank's tokens in its own order (all experts, ascending id, then token), and count_E int32."""
    total_E, chunk_CE, rank_NA = torch.ops.megamoe.moe_count(topk_idx_NA, num_experts)
    row, owner, weight, source, count_E, received = torch.ops.megamoe.moe_place(topk_idx_NA, topk_weight_NA, total_E[None], 0, chunk_CE, rank_NA)
    return Slots(row, owner, weight, source, received), count_E


@dataclass
class Handle:
    """What `combine` needs."""

    slots: Slots
    weight_NA: torch.Tensor  # in the order of topk_idx, in the autograd graph
    exchange: reference.Exchange | None = None

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        if self.exchange is not None:
            out_RD = self.exchange.back(out_RD, self.weight_NA.numel())
        return _Combine.apply(out_RD, self.weight_NA, self.slots)


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts):
    """See the contract in `megamoe.ops.moe_dispatch`. bf16 on a GPU."""
    slots, count_E = place(topk_idx_NA.contiguous(), topk_weight_NA.detach().float().contiguous(), num_experts)
    rows_RD = _Send.apply(x_ND, slots)
    handle = Handle(slots, topk_weight_NA)
    if group is None:
        return rows_RD, count_E, handle
    handle.exchange, count_e = reference._plan_exchange(count_E, group)
    return handle.exchange.out(rows_RD), count_e, handle


class _Send(torch.autograd.Function):
    """Token n's row into each of its slots; rows of no slot are zero. Backward: the plain sum back, in slot order."""

    @staticmethod
    def forward(ctx, x_ND, slots):
        ctx.slots = slots
        rows_RD = x_ND.new_empty(slots.row_NA.numel(), x_ND.shape[1])
        torch.ops.megamoe.moe_send(x_ND.contiguous(), slots.row_NA, slots.owner_NA, [rows_RD], [])
        torch.ops.megamoe.moe_zero_rest(rows_RD, slots.received)
        return rows_RD

    @staticmethod
    def backward(ctx, drows_RD):
        slots = ctx.slots
        return torch.ops.megamoe.moe_combine([drows_RD.contiguous()], slots.row_NA, slots.owner_NA, None), None


class _Combine(torch.autograd.Function):
    """y[n] = sum over slots of weight * row, fp32, one rounding."""

    @staticmethod
    def forward(ctx, out_RD, weight_NA, slots):
        out_RD = out_RD.contiguous()
        ctx.slots, ctx.weight_dtype = slots, weight_NA.dtype
        ctx.save_for_backward(out_RD)
        return torch.ops.megamoe.moe_combine([out_RD], slots.row_NA, slots.owner_NA, slots.weight_NA)

    @staticmethod
    def backward(ctx, dy_ND):
        (out_RD,), s = ctx.saved_tensors, ctx.slots
        dout_RD = torch.empty_like(out_RD)
        dweight_NA = torch.ops.megamoe.moe_send_weighted(dy_ND.contiguous(), [out_RD], [dout_RD], s.row_NA, s.owner_NA, s.weight_NA, s.source_NA)
        torch.ops.megamoe.moe_zero_rest(dout_RD, s.received)
        return dout_RD, dweight_NA.to(ctx.weight_dtype), None


def load():
    """Load the extension and return `dispatch`."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    return dispatch
