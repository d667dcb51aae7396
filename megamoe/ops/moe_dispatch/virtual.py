"""All ranks of an expert-parallel group played by one process on one GPU: the test bed of csrc/moe_dispatch.

The kernels only see tables of base addresses, so what runs here is what runs between processes, minus the barriers between
phases, which one stream gives for free. Buffers are sized from the received counts: one host sync, as a test bed may.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.ops.moe_dispatch.cuda import Slots

ops = torch.ops.megamoe


@dataclass
class Exchanged:
    """One dispatch of P ranks.

    Attributes:
        rows: per rank (R_p, D), grouped by its experts, within an expert by source rank, then token.
        count: per rank (E/P,) int32.
        slots: per rank, where its own tokens went.
    """

    rows: list[torch.Tensor]
    count: list[torch.Tensor]
    slots: list[Slots]


def dispatch(x_PND: list[torch.Tensor], idx_PNA: list[torch.Tensor], weight_PNA: list[torch.Tensor], *, num_experts: int, deduplicate: bool) -> Exchanged:
    """Send every rank's tokens. Lists hold one tensor per rank, N may differ and be zero; dtypes as in the contract, bf16 rows.

    deduplicate: a token crosses to a rank once, however many of its experts live there; the receiver copies the rest.
    """
    P = len(x_PND)
    counted = [ops.moe_count(idx, num_experts) for idx in idx_PNA]
    counts_PE = torch.stack([total for total, _, _ in counted])
    slots, count = [], []
    for me, (idx, weight, (_, chunk, rank)) in enumerate(zip(idx_PNA, weight_PNA, counted)):
        *placed, count_e, received = ops.moe_place(idx, weight, counts_PE, me, chunk, rank)
        slots.append(Slots(*placed, received))
        count.append(count_e)
    received = torch.cat([s.received for s in slots]).tolist()
    rows = [x_PND[0].new_full((R, x_PND[0].shape[1]), float("nan")) for R in received]
    copy_of = [torch.empty(R, dtype=torch.int32, device=counts_PE.device) for R in received] if deduplicate else []
    for x, s in zip(x_PND, slots):
        ops.moe_send(x, s.row_NA, s.owner_NA, rows, copy_of)
    for p in range(P if deduplicate else 0):
        ops.moe_expand(rows[p], copy_of[p], slots[p].received)
    return Exchanged(rows, count, slots)


def combine(out_PRD: list[torch.Tensor], exchanged: Exchanged) -> list[torch.Tensor]:
    """Per rank (N, D'): the weighted sum over its tokens' slots, pulled from the owners."""
    return [ops.moe_combine(out_PRD, s.row_NA, s.owner_NA, s.weight_NA) for s in exchanged.slots]


def dispatch_bwd(drows_PRD: list[torch.Tensor], exchanged: Exchanged) -> list[torch.Tensor]:
    """Per rank (N, D): the plain sum of its slots' gradients, in slot order."""
    return [ops.moe_combine(drows_PRD, s.row_NA, s.owner_NA, None) for s in exchanged.slots]


def combine_bwd(dy_PND: list[torch.Tensor], out_PRD: list[torch.Tensor], exchanged: Exchanged) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(d_out per owner, d_weight per rank in the order of its idx)."""
    dout = [torch.full_like(out, float("nan")) for out in out_PRD]
    dweight = [ops.moe_send_weighted(dy, out_PRD, dout, s.row_NA, s.owner_NA, s.weight_NA, s.source_NA) for dy, s in zip(dy_PND, exchanged.slots)]
    return dout, dweight
