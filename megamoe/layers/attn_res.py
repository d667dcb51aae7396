"""Attention Residuals: one learned pseudo-query over the rows written so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megamoe.layers.basic import Linear, RMSNorm
from megamoe.ops import attn_res_mix
from megamoe.ops.late import LateChoice


class AttnRes(nn.Module):
    """mix(rows) of `megamoe.ops.attn_res_mix` with this sublayer's query and norm weight.

    Parameters carry the released names and shapes: proj.weight (1, D) is the pseudo-query and starts at ZERO, so that
    every row weighs the same; norm.weight (D,) starts at one. Neither module is called as such.
    """

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, eps)
        self.proj = Linear(d_model, 1)
        self.op = LateChoice(attn_res_mix.OP, D=d_model)

    def forward(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """rows: (T, D) each, bank first, running sum last. Returns (T, D)."""
        return self.op.on(rows[0])(rows, self.proj.weight[0], self.norm.weight, eps=self.norm.eps)
