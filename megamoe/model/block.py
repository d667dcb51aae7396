"""One layer of the backbone: mix, norm, attention, add; mix, norm, FFN, add.

The residual stream is a bank of finished rows and a running sum ("prefix"):

    h = mix(bank + [prefix])                      attention over depth; the plain sum when AttnRes is off
    at a block border: bank += [prefix]; prefix = nothing
    prefix += attention( norm(h) )
    prefix += ffn( norm( mix(bank + [prefix]) ) )

Rows are written once and shared by reference: a bank is a tuple, never a concatenation. With `attn_res: full` every
sublayer is a block of its own, so the sum is also closed in front of the FFN. In layer 0 the first mix sees one row and
is the identity; it runs all the same, so that its parameters, which the release carries, get exact zero gradients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamoe.layers.attn_res import AttnRes
from megamoe.layers.basic import RMSNorm
from megamoe.layers.ffn import GatedMLP
from megamoe.layers.kda import KDA
from megamoe.layers.mla import MLA
from megamoe.layers.moe import MoE
from megamoe.layers.router import RouterStats
from megamoe.layers.stream import Stream
from megamoe.model.config import AttnResKind, ModelConfig

RECOMPUTE = ("none", "attention", "experts", "full")

Bank = tuple[torch.Tensor, ...]


class Block(nn.Module):
    """Layer `layer` (0-based) of the backbone.

    Args:
        full_attn, moe: what the layer holds; default from the config's lists.
        recompute: `none`; `attention` or `experts`: that sublayer is run again in backward instead of keeping its
            activations; `full`: the whole layer is. The mix keeps nothing wide in any case (see its op).
    """

    def __init__(self, config: ModelConfig, layer: int, *, recompute: str = "none", full_attn: bool | None = None, moe: bool | None = None) -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute={recompute!r}: choose one of {', '.join(RECOMPUTE)}")
        self.recompute = recompute
        self.attn_res = config.attn_res
        self.opens_block = config.opens_block(layer)
        D, eps = config.d_model, config.norm_eps
        if config.attn_res is not AttnResKind.off:
            self.self_attention_res = AttnRes(D, eps)
            self.mlp_res = AttnRes(D, eps)
        self.input_layernorm = RMSNorm(D, eps)
        full_attn = config.is_full_attn(layer) if full_attn is None else full_attn
        self.self_attn = MLA(D, config.mla) if full_attn else KDA(D, config.kda)
        self.post_attention_layernorm = RMSNorm(D, eps)
        if config.is_moe(layer) if moe is None else moe:
            self.block_sparse_moe = MoE(D, eps, config.moe, config.ffn)
        else:
            self.mlp = GatedMLP(D, config.ffn.dense_size, config.ffn)

    @property
    def is_moe(self) -> bool:
        return hasattr(self, "block_sparse_moe")

    def forward(self, bank: Bank, prefix_TD: torch.Tensor, stream: Stream) -> tuple[Bank, torch.Tensor]:
        """Run the layer on one micro-batch.

        Args:
            bank: finished rows, (T, D) each; () in front of layer 0 and when AttnRes is off.
            prefix_TD: the running sum; the embedding in front of layer 0.

        Returns: the bank, longer by the rows this layer closed, and the new running sum.

        Router statistics are added up here, outside of anything that backward runs again.
        """
        if self.recompute == "full" and torch.is_grad_enabled():
            bank, prefix_TD, stats = _again_in_backward(self._run, bank, prefix_TD, stream)
        else:
            bank, prefix_TD, stats = self._run(bank, prefix_TD, stream)
        if stats is not None:
            self.block_sparse_moe.gate.accumulate(stats)
        return bank, prefix_TD

    def _run(self, bank: Bank, prefix_TD: torch.Tensor, stream: Stream) -> tuple[Bank, torch.Tensor, RouterStats | None]:
        banked = self.attn_res is not AttnResKind.off
        h_TD = self.self_attention_res((*bank, prefix_TD)) if banked else prefix_TD
        if self.opens_block:
            bank, prefix_TD = (*bank, prefix_TD), None
        a_TD = self._sublayer("attention", self._attention, h_TD, stream)
        prefix_TD = a_TD if prefix_TD is None else prefix_TD + a_TD
        h_TD = self.mlp_res((*bank, prefix_TD)) if banked else prefix_TD
        if self.attn_res is AttnResKind.full:
            bank, prefix_TD = (*bank, prefix_TD), None
        y_TD, stats = self._sublayer("experts", self._ffn, h_TD, stream)
        prefix_TD = y_TD if prefix_TD is None else prefix_TD + y_TD
        return bank, prefix_TD, stats

    def _sublayer(self, name: str, fn, h_TD: torch.Tensor, stream: Stream):
        if self.recompute == name and torch.is_grad_enabled():
            return _again_in_backward(fn, h_TD, stream)
        return fn(h_TD, stream)

    def _attention(self, h_TD: torch.Tensor, stream: Stream) -> torch.Tensor:
        x_TD = self.input_layernorm(h_TD)
        if isinstance(self.self_attn, KDA):
            return self.self_attn(x_TD, stream)[0]
        return self.self_attn(x_TD, stream)

    def _ffn(self, h_TD: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, RouterStats | None]:
        x_TD = self.post_attention_layernorm(h_TD)
        if self.is_moe:
            return self.block_sparse_moe(x_TD, stream.token_mask_T)
        return self.mlp(x_TD), None


def _again_in_backward(fn, *args):
    # Nothing here draws random numbers, so there is no generator state to carry along.
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
