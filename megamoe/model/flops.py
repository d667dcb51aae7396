"""Model FLOPs of one training step, by kind of work: what MFU and tokens-per-second claims divide by.

A multiply-add is 2 FLOPs; backward costs twice the forward; recomputation is not model work and is not counted.
Elementwise work (norms, gates, mixes, activations) is left out, as is usual. Routed experts count top_k per token.

    matrices    6 FLOPs per weight a token meets (the head counts, the embedding look-up does not)
    KDA core    chunked form, C = 64: 5 products of C x K and 3 of K x V per token and head
    MLA core    per token and head, (qk width + v width) times the tokens it sees
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megamoe.model.config import ModelConfig

KDA_CHUNK = 64


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs of one token. Sum: `total`."""

    matrices: float
    kda_core: float
    mla_core: float

    @property
    def total(self) -> float:
        return self.matrices + self.kda_core + self.mla_core


@dataclass(frozen=True)
class ParamCounts:
    """Parameters of a model, counted on the built modules.

    Attributes:
        total: every parameter, and the router bias buffers, which are released with the weights.
        bias_buffers: entries of the router biases.
        routed: of the routed experts.
        activated: what one token meets, head counted, input embedding not: top_k of the routed experts, all else.
    """

    total: int
    bias_buffers: int
    embedding: int
    head: int
    routed: int
    activated: int

    @property
    def without_bias(self) -> int:
        return self.total - self.bias_buffers


def count_parameters(model: nn.Module, config: ModelConfig) -> ParamCounts:
    """Count a whole model (meta device will do). A tied head counts once, as embedding, and is activated."""
    params = [p for _, p in model.named_parameters()]
    bias = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    routed = sum(p.numel() for p in params if p.megamoe.is_expert)
    total = sum(p.numel() for p in params) + bias
    embedding = model.embed_tokens.weight.numel()
    head = 0 if config.tie_embeddings else model.lm_head.weight.numel()
    unused_embedding = 0 if config.tie_embeddings else embedding
    activated = total - unused_embedding - routed + routed * config.moe.top_k // config.moe.num_experts
    return ParamCounts(total, bias, embedding, head, routed, activated)


def flops_per_token(config: ModelConfig, counts: ParamCounts, mean_context: float) -> TokenFlops:
    """FLOPs of one token in training.

    Args:
        counts: of the whole model.
        mean_context: tokens that a token sees in MLA on average, itself included: (S+1)/2 for full windows of S; for
            packed documents sum(n_i (n_i + 1) / 2) / sum(n_i).
    """
    full = sum(config.is_full_attn(n) for n in range(config.num_layers)) + config.mtp.num_layers
    kda, mla = config.kda, config.mla
    core = (config.num_layers + config.mtp.num_layers - full) * kda.num_heads * (5 * 2 * KDA_CHUNK * kda.head_dim + 3 * 2 * kda.head_dim**2)
    scores = full * mla.num_heads * 2 * (mla.qk_head_dim + mla.v_head_dim) * mean_context
    head_again = config.mtp.num_layers * config.vocab_size * config.d_model
    return TokenFlops(matrices=6.0 * (counts.activated + head_again), kda_core=3.0 * core, mla_core=3.0 * scores)
