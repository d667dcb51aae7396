"""The gated MLP: dense layers and the shared experts."""

from __future__ import annotations

import torch
from torch import nn

from megamoe.layers.basic import Linear
from megamoe.layers.config import FFNConfig
from megamoe.ops import situ_glu
from megamoe.ops.late import LateChoice


class GatedMLP(nn.Module):
    """down( act(gate x, up x) ). x: (T, D), hidden width `size`."""

    def __init__(self, d_model: int, size: int, config: FFNConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(d_model, size)
        self.up_proj = Linear(d_model, size)
        self.down_proj = Linear(size, d_model)
        self.act = dict(act=config.act.name, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
        self.op = LateChoice(situ_glu.OP)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.op.on(x_TD)(self.gate_proj(x_TD), self.up_proj(x_TD), **self.act))
