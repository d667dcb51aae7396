"""Linear, Embedding, RMSNorm: parameters without values. `model/init.py` fills them, and nothing else does.

torch's own modules draw random numbers when they are built. Here a model is built on the meta device, cut up, moved,
and only then given values that depend on (seed, parameter name) alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from megamoe.ops import rms_norm, short_conv
from megamoe.ops.late import LateChoice


class KeepWide(nn.Module):
    """A module some of whose tensors stay in fp32 when the model is cast to a 16-bit dtype.

    `model.bfloat16()`, called by whoever it may be, would round decay scales, convolution taps and routing biases; this
    undoes it for the names listed, in the one place through which every cast goes.
    """

    wide_names: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        before = {name: getattr(self, name).detach() for name in self.wide_names}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype.itemsize < 4 <= old.dtype.itemsize:
                new.data = old.to(new.device)
        return self


class Linear(nn.Module):
    """y = x W^T, no bias. weight: (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Rows of weight: (num_embeddings, dim)."""

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_T, self.weight)


class RMSNorm(nn.Module):
    """See `megamoe.ops.rms_norm`. weight: (dim,)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.op = LateChoice(rms_norm.OP, D=dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op.on(x)(x, self.weight, eps=self.eps)


class GatedRMSNorm(KeepWide):
    """sigmoid(gate) * norm(x) * weight in fp32. weight: (dim,), kept in fp32 and shared by all heads."""

    wide_names = ("weight",)

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.op = LateChoice(rms_norm.GATED_OP, D=dim)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.op.on(x)(x, self.weight, gate, eps=self.eps)


class ShortConv(KeepWide):
    """Depthwise causal convolution with SiLU; see `megamoe.ops.short_conv`. weight: (channels, 1, taps), kept in fp32."""

    wide_names = ("weight",)

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.op = LateChoice(short_conv.OP, C=channels, W=taps)

    def forward(self, x_TC, cu_seqlens, history_NWC=None, output_final_history=False):
        op = self.op.on(x_TC)
        return op(x_TC, self.weight, cu_seqlens=cu_seqlens, history_NWC=history_NWC, output_final_history=output_final_history)
