"""Kimi Delta Attention: linear attention with a per-channel decay and the delta rule.

    q, k, v = SiLU(conv(Wq x)), SiLU(conv(Wk x)), SiLU(conv(Wv x))
    z = f_b(f_a x),  beta logits = b x
    o = kda(q, k, v, z, beta)                     normalisation, gate and recurrence inside the op
    y = Wo [ sigmoid(gate x) * RMS(o) * o_norm ]

Letters: T tokens, D model width, H heads, K head width (keys and values alike), C = H*K channels, N documents.
Source: arXiv:2510.26692, arXiv:2607.24653 sec. 2.1; code ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from megamoe.layers.basic import GatedRMSNorm, KeepWide, Linear, ShortConv
from megamoe.layers.stream import Stream
from megamoe.layers.config import GateKind, KDAConfig, OutputGate
from megamoe.ops import kda_chunk
from megamoe.ops.late import LateChoice


assert {kind.name for kind in GateKind} == set(kda_chunk.GATES)


class KDAState(NamedTuple):
    """What a document leaves behind for its continuation.

    Attributes:
        recurrent_NHKV: (N, H, K, V) fp32.
        q_NWC, k_NWC, v_NWC: (N, taps-1, C) last raw inputs of the three convolutions.
    """

    recurrent_NHKV: torch.Tensor
    q_NWC: torch.Tensor
    k_NWC: torch.Tensor
    v_NWC: torch.Tensor


class KDA(KeepWide):
    """One KDA layer. Rows of every projection are head-major: row = head * head_dim + channel."""

    wide_names = ("A_log", "dt_bias")

    def __init__(self, d_model: int, config: KDAConfig) -> None:
        super().__init__()
        self.config = config
        C = config.width
        self.q_proj = Linear(d_model, C)
        self.k_proj = Linear(d_model, C)
        self.v_proj = Linear(d_model, C)
        self.q_conv1d = ShortConv(C, config.conv_kernel)
        self.k_conv1d = ShortConv(C, config.conv_kernel)
        self.v_conv1d = ShortConv(C, config.conv_kernel)
        self.f_a_proj = Linear(d_model, config.head_dim)
        self.f_b_proj = Linear(config.head_dim, C)
        self.b_proj = Linear(d_model, config.num_heads)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(C))
        if config.output_gate is OutputGate.full:
            self.g_proj = Linear(d_model, C)
        else:
            self.g_a_proj = Linear(d_model, config.head_dim)
            self.g_b_proj = Linear(config.head_dim, C)
        self.o_norm = GatedRMSNorm(config.head_dim, config.norm_eps)
        self.o_proj = Linear(C, d_model)
        self.op = LateChoice("kda_chunk", prefer=config.backend, K=config.head_dim, V=config.head_dim, gate=config.gate.name)

    def forward(
        self, x_TD: torch.Tensor, stream: Stream, *, state: KDAState | None = None, output_state: bool = False
    ) -> tuple[torch.Tensor, KDAState | None]:
        """Attend within each document of the stream.

        Args:
            x_TD: (T, D) normalised layer input.
            state: what came before each document; None means nothing did.
            output_state: also return what each document leaves behind.

        Returns: y_TD in x's dtype, and the state or None.
        """
        cu, c = stream.cu_seqlens, self.config
        history = (None, None, None) if state is None else state[1:]
        convs = ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        (q, q_last), (k, k_last), (v, v_last) = (conv(proj(x_TD), cu, h, output_state) for (proj, conv), h in zip(convs, history))
        heads = (c.num_heads, c.head_dim)
        o_THK, recurrent = self.core(x_TD, stream)(
            q.unflatten(-1, heads),
            k.unflatten(-1, heads),
            v.unflatten(-1, heads),
            self.f_b_proj(self.f_a_proj(x_TD)).unflatten(-1, heads),
            self.b_proj(x_TD),
            A_log_H=self.A_log,
            dt_bias_HK=self.dt_bias.unflatten(-1, heads),
            gate=c.gate.name,
            lower_bound=c.lower_bound,
            cu_seqlens=cu,
            initial_state_NHKV=None if state is None else state.recurrent_NHKV,
            output_final_state=output_state,
        )
        y_THK = self.o_norm(o_THK, self.output_gate(x_TD).unflatten(-1, heads))
        y_TD = self.o_proj(y_THK.flatten(-2))
        return y_TD, KDAState(recurrent, q_last, k_last, v_last) if output_state else None

    def output_gate(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Logits of the output gate, (T, C)."""
        if self.config.output_gate is OutputGate.full:
            return self.g_proj(x_TD)
        return self.g_b_proj(self.g_a_proj(x_TD))

    def core(self, x_TD: torch.Tensor, stream: Stream):
        """The callable that attends, `megamoe.ops.kda_chunk`'s contract."""
        return self.op.on(x_TD)

