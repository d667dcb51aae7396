"""Choose experts in fp32 and report, as values, what balancing needs to know.

    s   = sigmoid(x W^T)                         full-width x
    idx = top-k of s + b                         b only selects (threshold rule: logits + b)
    p   = s[idx] / (sum s[idx] + 1e-20) * routed_scaling_factor

The statistics are returned, not added up here: a router may run inside a recomputed function, twice per micro-batch.
`accumulate` is called by the block outside of it, once. They are integers, so that no split of a batch over ranks or
micro-batches, and no order of adding, can change them by a bit.

Letters: N tokens, D model width, E experts, A experts per token, B histogram bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from megamoe.layers.basic import KeepWide
from megamoe.layers.config import Balancing, MoEConfig
from megamoe.ops.precision import wide

# Softmax loads are added up in fixed point: 2^-32 per unit leaves 2^31 tokens a step before int64 is full.
LOAD_ONE = 2**32


class RouterStats(NamedTuple):
    """One micro-batch's contribution. Padding tokens are in none of them.

    Attributes:
        count_E: int64 slots that chose each expert.
        histogram_EB: int32 tokens per bin of the bias that expert would have needed (quantile rule), else None.
        load_E: int64 sum of softmax(logits) in units of 1/LOAD_ONE (threshold rule), else None.
    """

    count_E: torch.Tensor
    histogram_EB: torch.Tensor | None
    load_E: torch.Tensor | None


class Router(KeepWide):
    """Scores, selection, late weights, statistics.

    Attributes:
        weight: (E, D) parameter.
        e_score_correction_bias: (E,) fp32 buffer, moved by `layers.balance` between steps, never by a gradient.
        count_E, histogram_EB, load_E: what was accumulated since the last update; integers, not saved: they are zero
            at every step's end.
    """

    wide_names = ("e_score_correction_bias",)

    def __init__(self, d_model: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        E = config.num_experts
        self.weight = nn.Parameter(torch.empty(E, d_model))
        self.register_buffer("e_score_correction_bias", torch.zeros(E, dtype=torch.float32))
        self.register_buffer("count_E", torch.zeros(E, dtype=torch.int64), persistent=False)
        bins = config.histogram_bins if config.balancing is Balancing.quantile else 0
        self.register_buffer("histogram_EB", torch.zeros(E, bins, dtype=torch.int32), persistent=False)
        loads = E if config.balancing is Balancing.threshold else 0
        self.register_buffer("load_E", torch.zeros(loads, dtype=torch.int64), persistent=False)

    def forward(self, x_ND: torch.Tensor, token_mask_N: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, RouterStats | None]:
        """Route N tokens.

        Args:
            x_ND: (N, D) any float dtype. token_mask_N: (N,) bool, False for padding: routed nowhere, counted nowhere.

        Returns:
            topk_idx_NA: int64 expert ids, -1 for padding.
            topk_weight_NA: fp32 late weights, differentiable.
            stats: in training mode, else None.

        No host sync.
        """
        c = self.config
        dtype = wide(x_ND.dtype)
        logits_NE = F.linear(x_ND.to(dtype), self.weight.to(dtype))
        score_NE = torch.sigmoid(logits_NE)
        with torch.no_grad():
            base_NE = logits_NE if c.balancing is Balancing.threshold else score_NE
            # One more than used: the (k+1)-th biased score is the bar that every other expert had to clear.
            top = (base_NE + self.e_score_correction_bias.to(dtype)).topk(min(c.top_k + 1, c.num_experts), dim=-1)
            idx_NA = top.indices[:, : c.top_k]
        weight_NA = score_NE.gather(1, idx_NA)
        weight_NA = weight_NA / (weight_NA.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        with torch.no_grad():
            stats = self._stats(logits_NE, score_NE, idx_NA, top.values[:, -1], token_mask_N) if self.training else None
            if token_mask_N is not None:
                idx_NA = idx_NA.masked_fill(~token_mask_N[:, None], -1)
        return idx_NA, weight_NA, stats

    def _stats(self, logits_NE, score_NE, idx_NA, cutoff_N, token_mask_N) -> RouterStats:
        E = self.config.num_experts
        real_N = torch.ones_like(cutoff_N, dtype=torch.int32) if token_mask_N is None else token_mask_N.to(torch.int32)
        one_NA = real_N[:, None].expand_as(idx_NA).to(torch.int64)
        count_E = torch.zeros_like(self.count_E).scatter_add_(0, idx_NA.reshape(-1), one_NA.reshape(-1))
        histogram_EB = load_E = None
        if self.config.balancing is Balancing.quantile:
            low, width = histogram_range(self.e_score_correction_bias, self.config.histogram_bins)
            needed_NE = cutoff_N[:, None] - score_NE
            # A NaN score has no bin; as an index it would take the process down before the loss can report it.
            bin_NE = ((needed_NE - low) / width).floor().nan_to_num_(0).clamp_(0, self.config.histogram_bins - 1).long()
            bin_NE += torch.arange(E, device=bin_NE.device) * self.config.histogram_bins
            histogram_EB = torch.zeros_like(self.histogram_EB)
            histogram_EB.view(-1).scatter_add_(0, bin_NE.reshape(-1), real_N[:, None].expand_as(bin_NE).reshape(-1))
        if self.config.balancing is Balancing.threshold:
            share_NE = (torch.softmax(logits_NE, -1).double() * LOAD_ONE).round().long()
            load_E = (share_NE * real_N[:, None]).sum(0)
        return RouterStats(count_E, histogram_EB, load_E)

    @torch.no_grad()
    def accumulate(self, stats: RouterStats) -> None:
        """Add one micro-batch's statistics. Call once per micro-batch, outside any recomputed function."""
        self.count_E += stats.count_E
        if stats.histogram_EB is not None:
            self.histogram_EB += stats.histogram_EB
        if stats.load_E is not None:
            self.load_E += stats.load_E

    @torch.no_grad()
    def reset_stats(self) -> None:
        """Forget what was accumulated."""
        for x in (self.count_E, self.histogram_EB, self.load_E):
            x.zero_()


def histogram_range(bias_E: torch.Tensor, num_bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest edge, bin width) of the histogram of required biases, as device scalars in the wide dtype.

    A required bias is cutoff - score; the cutoff is a score plus a present bias, scores lie in (0, 1): so it lies within
    one of the extremes of the present bias.
    """
    bias_E = bias_E.to(wide(bias_E.dtype))
    low, high = bias_E.min() - 1, bias_E.max() + 1
    return low, (high - low) / num_bins
