"""Move router biases once per step from what the whole global batch did.

Three rules, each a function of integers and the present bias; all compute in float64, so every rank that holds the same
integers writes the same bits.

    quantile    the bias with which each expert would have been chosen by exactly its share of tokens, read off a pooled
                histogram; replaces the bias, centred. No rate, no memory except through the cutoffs.
    sign        bias += sign_rate * sign(mean load - load)
    threshold   -step where load > high * median, +step where load < low * median, else 0; load = sum of softmax(logits)
                over the batch just seen; replaces the bias, never accumulated. Added to logits, for selection only.

Source: arXiv:2607.24653 sec. 2.3.3 and app. D (quantile), arXiv:2408.15664 (sign); code ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megamoe.layers.config import Balancing
from megamoe.layers.router import Router, histogram_range


@dataclass(frozen=True)
class BalanceReport:
    """What the step's routing looked like, still on the device. One row per MoE layer, in module order.

    Attributes:
        layers: module names of the routers.
        count_LE: int64 slots per expert over the global batch.
        max_vio_L: float64 largest load / mean load - 1; 0 for an empty batch.
        bias_LE: the biases that take effect in the next step.
    """

    layers: list[str]
    count_LE: torch.Tensor
    max_vio_L: torch.Tensor
    bias_LE: torch.Tensor


@torch.no_grad()
def update_router_biases(model: nn.Module, group=None) -> BalanceReport | None:
    """Pool the accumulated statistics over `group`, move every router's bias, forget the statistics.

    Args:
        model: anything that holds `Router` modules; the same ones, in the same order, on every rank of the group.
        group: the ranks that hold different tokens of the same layers (dp x cp x, under sequence parallelism, tp), or
            None for one rank. Ranks that hold copies of the same tokens must not be in it twice.

    Returns: the report, or None for a model without MoE layers. In eval mode biases stay and nothing was accumulated.

    Collective: one integer all-reduce per layer, plus one for the counts of all layers. No host sync.
    """
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]
    if not named:
        return None
    routers = [router for _, router in named]
    count_LE = torch.stack([router.count_E for router in routers])
    if group is not None:
        dist.all_reduce(count_LE, group=group)
    for router, count_E in zip(routers, count_LE):
        if not router.training:
            continue
        if group is not None and router.config.balancing is Balancing.quantile:
            dist.all_reduce(router.histogram_EB, group=group)
        if group is not None and router.config.balancing is Balancing.threshold:
            dist.all_reduce(router.load_E, group=group)
        bias_E = router.e_score_correction_bias
        bias_E.copy_(_new_bias(router, count_E))
        router.reset_stats()
    mean_L = count_LE.double().mean(-1)
    max_vio_L = torch.where(mean_L > 0, count_LE.max(-1).values / mean_L - 1, 0)
    bias_LE = torch.stack([router.e_score_correction_bias.detach().clone() for router in routers])
    return BalanceReport([name for name, _ in named], count_LE, max_vio_L, bias_LE)


def _new_bias(router: Router, count_E: torch.Tensor) -> torch.Tensor:
    c, bias_E = router.config, router.e_score_correction_bias
    if c.balancing is Balancing.quantile:
        return quantile_bias(router.histogram_EB, bias_E, top_k=c.top_k)
    if c.balancing is Balancing.sign:
        return sign_bias(count_E, bias_E, rate=c.sign_rate)
    if c.balancing is Balancing.threshold:
        return threshold_bias(router.load_E, step=c.threshold_step, high=c.threshold_high, low=c.threshold_low).to(bias_E.dtype)
    return bias_E


def quantile_bias(histogram_EB: torch.Tensor, bias_E: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """The (k/n)-quantile of each expert's required bias, centred.

    Args:
        histogram_EB: (E, B) integers: tokens per bin of (cutoff - score), every row summing to the m tokens of the batch.
        bias_E: the bias those tokens were routed with; it fixes the bins.

    Returns: (E,) in bias's dtype. With no token counted, the bias as it was.
    """
    E, B = histogram_EB.shape
    cumulative_EB = histogram_EB.cumsum(1, dtype=torch.int64)
    m = cumulative_EB[0, -1]
    share = (m * top_k).double() / E  # q = m k / n slots per expert
    target = (m * top_k + E - 1) // E
    bin_E1 = (cumulative_EB >= target).int().argmax(1, keepdim=True)
    inside_E = histogram_EB.gather(1, bin_E1)[:, 0].double()
    before_E = cumulative_EB.gather(1, bin_E1)[:, 0].double() - inside_E
    low, width = (x.double() for x in histogram_range(bias_E, B))
    within_E = ((share - before_E) / inside_E.clamp(min=1)).clamp(0, 1)
    required_E = low + (bin_E1[:, 0] + within_E) * width
    return torch.where(m > 0, (required_E - required_E.mean()).to(bias_E.dtype), bias_E)


def sign_bias(count_E: torch.Tensor, bias_E: torch.Tensor, *, rate: float) -> torch.Tensor:
    """bias + rate * sign(mean load - load), decided in integers: E * load against the sum of loads."""
    return bias_E + rate * torch.sign(count_E.sum() - count_E * count_E.shape[0]).to(bias_E.dtype)


def threshold_bias(load_E: torch.Tensor, *, step: float, high: float, low: float) -> torch.Tensor:
    """(E,) float64 of -step, 0, +step. The median of an even number of loads is the mean of the middle two."""
    load_E = load_E.double()
    median = load_E.quantile(0.5)
    return step * ((load_E < low * median).double() - (load_E > high * median).double())
