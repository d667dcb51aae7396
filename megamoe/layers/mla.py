"""Gated multi-head latent attention.

    q        = q_b( RMS(q_a x) )              per head: qk_nope_head_dim | qk_rope_head_dim      (or q_proj x)
    [c | e]  = kv_a x                         latent | one key part that all heads share
    [kn | v] = kv_b( RMS(c) )                 per head, keys first
    k        = [kn ; e]
    o        = softmax(q k^T scale, causal within the document) v           softmax and o in fp32
    y        = Wo [ sigmoid(Wg x) * o ]

With `rope: none` the "rope" dims are ordinary content and nothing knows positions. The other kinds rotate interleaved
pairs (2i, 2i+1) of the last qk_rope_head_dim dims of q and of e by the token's position in its document.

Source: arXiv:2405.04434 (MLA), arXiv:2607.24653 sec. 2.1.2 (gate, NoPE), arXiv:2309.00071 (YaRN); code ours.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from megamoe.layers.basic import Linear, RMSNorm
from megamoe.layers.stream import Stream
from megamoe.layers.config import MLAConfig, RopeKind
from megamoe.ops import mla_attention
from megamoe.ops.late import LateChoice
from megamoe.ops.mla_attention import max_logit

# YaRN: wavelengths that turn more than FAST times within the original context are left alone, those that turn less than
# SLOW times are interpolated, those between are blended. The paper's values.
YARN_FAST_TURNS = 32.0
YARN_SLOW_TURNS = 1.0


class MLA(nn.Module):
    """One MLA layer.

    Attributes:
        watch_logits: whether a forward that records gradients also takes each head's largest logit (for QK-clip).
        max_logit_H: (H,) of this rank's heads, fp32 or float64: largest logit since it was last set to None, or None. A
            maximum may be taken twice, so running a layer again in backward costs time and changes nothing.
    """

    def __init__(self, d_model: int, config: MLAConfig) -> None:
        super().__init__()
        self.config = c = config
        if c.q_lora_rank is None:
            self.q_proj = Linear(d_model, c.num_heads * c.qk_head_dim)
        else:
            self.q_a_proj = Linear(d_model, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.norm_eps)
            self.q_b_proj = Linear(c.q_lora_rank, c.num_heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(d_model, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim))
        if c.output_gate:
            self.g_proj = Linear(d_model, c.num_heads * c.v_head_dim)
        self.o_proj = Linear(c.num_heads * c.v_head_dim, d_model)
        self.op = LateChoice(mla_attention.OP, prefer=c.backend, Q=c.qk_head_dim, V=c.v_head_dim)
        self.max_logit_op = LateChoice(max_logit.OP, Q=c.qk_head_dim)
        self.watch_logits = False
        self.max_logit_H: torch.Tensor | None = None

    def forward(self, x_TD: torch.Tensor, stream: Stream) -> torch.Tensor:
        """x_TD: (T, D) normalised layer input. Returns (T, D) in x's dtype."""
        q_THQ, k_THQ, v_THV = self.project(x_TD, stream.positions_T)
        o_THV = self.attend(q_THQ, k_THQ, v_THV, cu_seqlens=stream.cu_seqlens, max_seqlen=stream.max_seqlen)
        return self.output(o_THV, x_TD)

    def attend(self, q_THQ: torch.Tensor, k_THQ: torch.Tensor, v_THV: torch.Tensor, *, cu_seqlens: torch.Tensor, max_seqlen: int | None, cu_seqlens_k: torch.Tensor | None = None) -> torch.Tensor:
        """The attention core, (T, H, V); arguments as for the op. Notes the largest logits when they are watched."""
        where = dict(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, scale=softmax_scale(self.config))
        if self.watch_logits and torch.is_grad_enabled():
            top_H = self.max_logit_op.on(q_THQ)(q_THQ, k_THQ, **where)
            self.max_logit_H = top_H if self.max_logit_H is None else torch.maximum(self.max_logit_H, top_H)
        return self.op.on(q_THQ)(q_THQ, k_THQ, v_THV, max_seqlen=max_seqlen, **where)

    def output(self, o_THV: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """Gate and project the heads' outputs. (T, D) in x's dtype."""
        o_TC = o_THV.flatten(-2)
        if self.config.output_gate:
            o_TC = torch.sigmoid(self.g_proj(x_TD).to(o_TC.dtype)) * o_TC
        return self.o_proj(o_TC.to(x_TD.dtype))

    def project(self, x_TD: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, H, Q), keys (T, H, Q) and values (T, H, V) of the attention core."""
        return self.queries(x_TD, positions_T), *self.keys_values(self.latent(x_TD, positions_T))

    def queries(self, x_TD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """(T, H, Q)."""
        c = self.config
        q = self.q_proj(x_TD) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        q_THQ = q.unflatten(-1, (c.num_heads, c.qk_head_dim))
        if c.rope is not RopeKind.none:
            q_nope, q_rope = q_THQ.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
            q_THQ = torch.cat([q_nope, rotate(q_rope, *rotation(c, positions_T))], -1)
        return q_THQ

    def latent(self, x_TD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """(T, L + R): the normalised latent and the key part that all heads share. All that later tokens need of a token."""
        c = self.config
        latent_TL, shared_TR = self.kv_a_proj_with_mqa(x_TD).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        if c.rope is not RopeKind.none:
            shared_TR = rotate(shared_TR.unsqueeze(1), *rotation(c, positions_T)).squeeze(1)
        return torch.cat([self.kv_a_layernorm(latent_TL), shared_TR], -1)

    def keys_values(self, latent_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (T, H, Q) and values (T, H, V) out of `latent`."""
        c = self.config
        latent_TL, shared_TR = latent_TM.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(latent_TL).unflatten(-1, (c.num_heads, -1))
        k_nope, v_THV = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        return torch.cat([k_nope, shared_TR.unsqueeze(1).expand(-1, c.num_heads, -1)], -1), v_THV


def softmax_scale(config: MLAConfig) -> float:
    """qk_head_dim**-0.5; under YaRN times the square of 0.1 ln(factor) + 1.

    YaRN puts its temperature into the rotated vectors; here only part of the head is rotated, so it goes into the scale.
    """
    scale = config.qk_head_dim**-0.5
    if config.rope is RopeKind.yarn:
        scale *= (0.1 * math.log(config.rope_factor) + 1.0) ** 2
    return scale


def rope_frequencies(config: MLAConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """(R/2,) float64 radians per position of each rotated pair."""
    R = config.qk_rope_head_dim
    pair = torch.arange(0, R, 2, dtype=torch.float64, device=device)
    plain = config.rope_theta ** (-pair / R)
    if config.rope is RopeKind.rotary:
        return plain
    stretched = plain / config.rope_factor
    if config.rope is RopeKind.linear:
        return stretched

    def pair_of(turns: float) -> float:
        """The (fractional) pair index that turns so many times within the original context."""
        return R * math.log(config.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(YARN_FAST_TURNS)), 0)
    high = min(math.ceil(pair_of(YARN_SLOW_TURNS)), R - 1)
    ramp = ((pair / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + stretched * ramp


def rotation(config: MLAConfig, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (T, R/2) float64. In fp32 the angle of position 10^6 would be off by 0.06 rad."""
    angle = positions_T.to(torch.float64)[:, None] * rope_frequencies(config, positions_T.device)
    return angle.cos(), angle.sin()


def rotate(x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of the last dim. fp32 inside (float64 for float64), x's dtype out."""
    dtype = torch.promote_types(x_THR.dtype, torch.float32)
    cos, sin = (t.to(dtype)[:, None, :] for t in (cos, sin))
    even, odd = x_THR.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x_THR.dtype)
