"""The text model, and any consecutive part of it.

    bank, prefix = (), embed(tokens)
    for each layer:  bank, prefix = layer(bank, prefix)
    hidden = mix(bank + [prefix]);   logits = head( norm(hidden) )

`embed`, `run_layers`, `finish` and `token_losses` are apart and take the bank as an argument, so that a pipeline stage
is the same class holding fewer layers. Module paths are the released tensor names (see `params.logical_name`) on every
stage: layers are keyed by their number in the whole model.

Source: arXiv:2607.24653; code ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megamoe.layers.attn_res import AttnRes
from megamoe.layers.basic import Embedding, Linear, RMSNorm
from megamoe.layers.stream import Stream
from megamoe.model.block import Bank, Block
from megamoe.model.config import AttnResKind, ModelConfig
from megamoe.model.mtp import MTP, mtp_labels, shift_within_documents
from megamoe.model.params import annotate
from megamoe.ops import linear_cross_entropy
from megamoe.ops.late import LateChoice


class Transformer(nn.Module):
    """A K3-family model, or the part of it that one pipeline stage holds.

    Parameters are uninitialised: build under `torch.device("meta")` or on the target device, then call
    `model.init.init_parameters` or load a checkpoint. Every parameter carries a `ParamInfo` as `.megamoe`.

    Args:
        config: the whole model's.
        recompute: per layer, see `Block`.
        layers: 0-based numbers of the layers held here, in order; None means all.
        embed, head: whether this part holds the embedding, and the output mix, final norm, head and MTP layer.
    """

    def __init__(
        self, config: ModelConfig, *, recompute: str = "none", layers: Iterable[int] | None = None, embed: bool = True, head: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        D, eps = config.d_model, config.norm_eps
        numbers = range(config.num_layers) if layers is None else layers
        # The head multiplies by the embedding when they are tied, the MTP layer reads it: the last part needs it too.
        if embed or (head and (config.tie_embeddings or config.mtp.num_layers)):
            self.embed_tokens = Embedding(config.vocab_size, D)
        self.layers = nn.ModuleDict({str(n): Block(config, n, recompute=recompute) for n in numbers})
        if head:
            if config.attn_res is not AttnResKind.off:
                self.output_attn_res = AttnRes(D, eps)
            self.norm = RMSNorm(D, eps)
            if not config.tie_embeddings:
                self.lm_head = Linear(D, config.vocab_size)
            if config.mtp.num_layers:
                self.mtp = MTP(config, recompute=recompute)
        self.loss_op = LateChoice(linear_cross_entropy.OP, V=config.vocab_size, D=D)
        annotate(self)

    def forward(
        self,
        tokens_T: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        positions_T: torch.Tensor | None = None,
        token_mask_T: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """The whole model on one packed stream.

        Args:
            tokens_T: (T,) int64 token ids.
            cu_seqlens, positions_T, token_mask_T, max_seqlen: see `Stream`. The mask is False on padding.

        Returns: hidden_TD, (T, D) in the parameters' dtype, in front of the final norm; for `head`, `token_losses` and
            `mtp_token_losses`.

        In training mode each call adds its routing statistics to the routers; `layers.balance.update_router_biases`
        uses them up once per step. No host sync on a GPU with the fast backends.
        """
        stream = Stream.build(tokens_T.shape[0], cu_seqlens, positions_T=positions_T, token_mask_T=token_mask_T, max_seqlen=max_seqlen)
        bank, prefix_TD = self.run_layers((), self.embed(tokens_T), stream)
        return self.finish(bank, prefix_TD)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """The running sum in front of layer 0, (T, D)."""
        return self.embed_tokens(tokens_T)

    def run_layers(self, bank: Bank, prefix_TD: torch.Tensor, stream: Stream) -> tuple[Bank, torch.Tensor]:
        """The layers held here."""
        for block in self.layers.values():
            bank, prefix_TD = block(bank, prefix_TD, stream)
        return bank, prefix_TD

    def finish(self, bank: Bank, prefix_TD: torch.Tensor) -> torch.Tensor:
        """The output mix, (T, D); the running sum itself when AttnRes is off."""
        if self.config.attn_res is AttnResKind.off:
            return prefix_TD
        return self.output_attn_res((*bank, prefix_TD))

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, D): the head's matrix, which is the embedding's when they are tied."""
        return self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight

    def head(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Logits (T, V). For sampling and tests; training goes through `token_losses`, which never holds them all."""
        return nn.functional.linear(self.norm(hidden_TD), self.head_weight)

    def token_losses(self, hidden_TD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        """Cross-entropy per token, (T,) fp32, zero where the label is -100. Divide by the global count, once."""
        return self.loss_op.on(hidden_TD)(self.norm(hidden_TD), self.head_weight, labels_T)

    def mtp_token_losses(
        self,
        hidden_TD: torch.Tensor,
        tokens_T: torch.Tensor,
        labels_T: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        positions_T: torch.Tensor | None = None,
        token_mask_T: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """The MTP layer's cross-entropy per token, (T,) fp32; arguments as `forward` and `token_losses`.

        At t it predicts labels[t+1]; zero at each document's last token and where labels[t+1] is -100. Its weight is
        `config.mtp.loss_weight`, applied by the caller.

        Raises:
            ValueError: the model has no MTP layer.
        """
        if not self.config.mtp.num_layers:
            raise ValueError("mtp.num_layers=0: this model has no MTP layer; set model.mtp.num_layers=1")
        stream = Stream.build(tokens_T.shape[0], cu_seqlens, positions_T=positions_T, token_mask_T=token_mask_T, max_seqlen=max_seqlen)
        # A document's last token has no successor: any token may stand in, its loss is masked and nothing attends to it later.
        next_TD = self.embed(shift_within_documents(tokens_T, stream, 0))
        return self.loss_op.on(hidden_TD)(self.mtp(hidden_TD, next_TD, stream), self.head_weight, mtp_labels(labels_T, stream))
