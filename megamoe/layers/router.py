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

from megamoe.layers.basic import KeepWide
from megamoe.layers.config import Balancing, MoEConfig
from megamoe.ops import moe_route, router_logits
from megamoe.ops.late import LateChoice
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
        self.product = LateChoice(router_logits.OP, D=d_model, E=E)
        self.op = LateChoice(moe_route.OP, E=E, A=config.top_k, B=config.histogram_bins)
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
        c, by_logits = self.config, self.config.balancing is Balancing.threshold
        logits_NE = self.product.on(x_ND)(x_ND, self.weight)
        routed = self.op.on(logits_NE)(
            logits_NE,
            self.e_score_correction_bias.to(logits_NE.dtype),
            top_k=c.top_k,
            scale=c.routed_scaling_factor,
            select_on_logits=by_logits,
            token_mask_N=token_mask_N,
            bins=self.histogram_EB.shape[1] if self.training else 0,
        )
        stats = None
        if self.training:
            load_E = softmax_load(logits_NE.detach(), token_mask_N) if by_logits else None
            stats = RouterStats(routed.count_E, routed.histogram_EB, load_E)
        return routed.idx_NA, routed.weight_NA, stats

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


def softmax_load(logits_NE: torch.Tensor, token_mask_N: torch.Tensor | None) -> torch.Tensor:
    """(E,) int64: sum of softmax(logits) over real tokens, in units of 1/LOAD_ONE."""
    share_NE = (torch.softmax(logits_NE, -1).double() * LOAD_ONE).round().long()
    return share_NE.sum(0) if token_mask_N is None else (share_NE * token_mask_N[:, None]).sum(0)


def histogram_range(bias_E: torch.Tensor, num_bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest edge, bin width) of the histogram of required biases, as device scalars in the wide dtype.

    A required bias is cutoff - score; the cutoff is a score plus a present bias, scores lie in (0, 1): so it lies within
    one of the extremes of the present bias.
    """
    bias_E = bias_E.to(wide(bias_E.dtype))
    low, high = bias_E.min() - 1, bias_E.max() + 1
    return low, (high - low) / num_bins
