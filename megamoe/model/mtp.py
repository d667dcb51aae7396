"""Multi-token prediction: from what the backbone knows at t and the token at t+1, predict the token at t+2.

    x_t = P [ RMS(h_t) ; RMS(embedding of token t+1) ]
    x   -> one backbone layer (MLA and, where the model has any, MoE) with a bank of its own -> mix -> RMS -> shared head

h is the backbone's last hidden state, in front of its final norm. Source: arXiv:2412.19437 sec. 2.2 for the wiring;
that the K3 release trained one such layer is known, its exact wiring is not. Code ours.
"""

from __future__ import annotations

import torch
from torch import nn

from megamoe.layers.attn_res import AttnRes
from megamoe.layers.basic import Linear, RMSNorm
from megamoe.layers.stream import Stream
from megamoe.model.block import Block
from megamoe.model.config import AttnResKind, ModelConfig
from megamoe.ops.linear_cross_entropy import IGNORE_LABEL


class MTP(nn.Module):
    """The extra layer. Embedding and head belong to the backbone and are used through it."""

    def __init__(self, config: ModelConfig, *, recompute: str = "none") -> None:
        super().__init__()
        D, eps = config.d_model, config.norm_eps
        self.hnorm = RMSNorm(D, eps)
        self.enorm = RMSNorm(D, eps)
        self.eh_proj = Linear(2 * D, D)
        has_moe = config.moe.first_dense_layers < config.num_layers
        # Layer 0's place in the bank (it opens a block), but the content of a late layer.
        self.block = Block(config, 0, recompute=recompute, full_attn=True, moe=has_moe)
        if config.attn_res is not AttnResKind.off:
            self.output_attn_res = AttnRes(D, eps)
        self.norm = RMSNorm(D, eps)

    def forward(self, hidden_TD: torch.Tensor, next_embedding_TD: torch.Tensor, stream: Stream) -> torch.Tensor:
        """hidden_TD, next_embedding_TD: (T, D). Returns (T, D), normalised, ready for the head's matrix."""
        x_TD = self.eh_proj(torch.cat([self.hnorm(hidden_TD), self.enorm(next_embedding_TD)], -1))
        bank, prefix_TD = self.block((), x_TD, stream)
        out_TD = self.output_attn_res((*bank, prefix_TD)) if bank else prefix_TD
        return self.norm(out_TD)


def shift_within_documents(x_T: torch.Tensor, stream: Stream, fill: int) -> torch.Tensor:
    """x_T[t+1] at t, `fill` at each document's last token. (T,) integers."""
    shifted = torch.cat([x_T[1:], x_T.new_full((1,), fill)])[: x_T.shape[0]]
    starts_next = torch.cat([stream.positions_T[1:] == 0, stream.positions_T.new_ones(1, dtype=torch.bool)])[: x_T.shape[0]]
    return torch.where(starts_next, fill, shifted)


def mtp_labels(labels_T: torch.Tensor, stream: Stream) -> torch.Tensor:
    """The label of t+1 at t; no loss at each document's last token."""
    return shift_within_documents(labels_T, stream, IGNORE_LABEL)
