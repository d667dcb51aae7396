"""Send tokens to experts and sum what comes back: the contract of `dispatch` and `combine`.

    rows_RD, count_e, handle = dispatch(x_ND, idx_NA, weight_NA, group=group, num_experts=E)
    y_ND = combine(experts(rows_RD, count_e), handle)

Routing weights are applied late, to the expert outputs. Every sum over a token's experts runs in fp32 in ascending
expert id, forward and backward, so that no layout of experts over ranks can change a bit of a token's result.

Letters: N tokens of this rank, A experts per token, E experts in all, e experts on this rank, R rows they receive.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.ops.backends import cuda_backend
from megamoe.ops.registry import choose, register

OP = "moe_dispatch"


def dispatch(
    x_ND: torch.Tensor, topk_idx_NA: torch.Tensor, topk_weight_NA: torch.Tensor, *, group, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Send each token to the ranks that own its experts.

    Args:
        x_ND: (N, D) any float dtype. This rank's tokens, any order.
        topk_idx_NA: (N, A) int64. Global expert ids, no id twice in a row; -1 leaves the slot empty.
        topk_weight_NA: (N, A) fp32 (float64 for float64 inputs). Router weights, used by `combine`.
        group: expert-parallel group, or None for one rank and no communication.
        num_experts: E over all ranks.

    Returns:
        rows_RD: (R, D) in x's dtype, grouped by local expert, within an expert by source rank, then token.
        count_e: (e,) int32, rows per local expert. It may sum to less than R: rows past the sum belong to no expert,
            their contents are zero, and `combine` never reads what is computed from them.
        handle: hand this unchanged to `combine`.

    Raises:
        ValueError: a shape, a dtype, an id outside -1 … E-1, or E not a multiple of the group's size. Ids are checked
            on CPU tensors only: on a GPU that would cost a host sync.

    Collective: every rank of `group`, also when N = 0. Syncs the host once, for R; with group None R is N*A and nothing
    syncs.
    Source: arXiv:2412.19437 sec. 3.2.2 (idea); code ours. Twin: reference.py.
    """
    validate(x_ND, topk_idx_NA, topk_weight_NA, group, num_experts)
    op = choose(OP, device=x_ND.device.type, dtype=x_ND.dtype, D=x_ND.shape[1], E=num_experts, A=topk_idx_NA.shape[1])
    return op(x_ND, topk_idx_NA, topk_weight_NA, group=group, num_experts=num_experts)


def combine(out_RD: torch.Tensor, handle: Any) -> torch.Tensor:
    """Bring expert outputs home: y_n = sum over n's experts, in ascending id, of weight * output.

    Args:
        out_RD: (R, D') in the order of `dispatch`'s rows; D' may differ from D.
        handle: from `dispatch`.

    Returns:
        y_ND: (N, D') in out's dtype; products and sum in fp32. A token with no expert gets exact zero.

    Differentiable in out_RD and in the weights that went into `dispatch`. The weight's gradient is <out, dy>.
    Collective: every rank of the group. No host sync. Twin: reference.py.
    """
    return handle.combine(out_RD)


def validate(x_ND, topk_idx_NA, topk_weight_NA, group, num_experts: int) -> None:
    """Check the contract of `dispatch` without touching the device (ids: on CPU tensors only)."""
    if x_ND.dim() != 2 or topk_idx_NA.dim() != 2 or topk_idx_NA.shape[0] != x_ND.shape[0]:
        raise ValueError(f"dispatch: x {tuple(x_ND.shape)} and topk_idx {tuple(topk_idx_NA.shape)} must be (N, D) and (N, A)")
    if topk_weight_NA.shape != topk_idx_NA.shape:
        raise ValueError(f"dispatch: topk_weight {tuple(topk_weight_NA.shape)} must have topk_idx's shape {tuple(topk_idx_NA.shape)}")
    if topk_idx_NA.dtype != torch.int64:
        raise ValueError(f"dispatch: topk_idx has dtype {topk_idx_NA.dtype}, expected torch.int64")
    size = 1 if group is None else torch.distributed.get_world_size(group)
    if num_experts % size:
        raise ValueError(f"dispatch: {num_experts} experts do not divide over {size} ranks; use a divisor of {num_experts}")
    if topk_idx_NA.device.type == "cpu" and topk_idx_NA.numel() and not (-1 <= int(topk_idx_NA.min()) and int(topk_idx_NA.max()) < num_experts):
        raise ValueError(f"dispatch: expert ids {int(topk_idx_NA.min())} … {int(topk_idx_NA.max())} must lie in -1 … {num_experts - 1}")


def _load_reference():
    from megamoe.ops.moe_dispatch.reference import dispatch

    return dispatch


register(OP, "cuda", **cuda_backend("megamoe.ops.moe_dispatch.cuda"))
register(OP, "cuda_ipc", **cuda_backend("megamoe.ops.moe_dispatch.cuda_ipc"))
register(OP, "reference", load=_load_reference)
# By name only: on a CPU they prove the protocol of the two above, and on GPUs nothing says yet when they are faster.
register(OP, "shared_memory", **cuda_backend("megamoe.ops.moe_dispatch.shared_memory"))
register(OP, "hierarchical", **cuda_backend("megamoe.ops.moe_dispatch.hierarchical"))
