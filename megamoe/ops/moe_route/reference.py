"""Routing in plain PyTorch. Ties go to the lower expert id, by a stable sort: torch.topk promises no order among equals."""

from __future__ import annotations

import torch

from megamoe.ops.moe_route import Routed


def route(logits_NE, bias_E, *, top_k, scale=1.0, select_on_logits=False, token_mask_N=None, bins=0):
    """See the contract in `megamoe.ops.moe_route`."""
    N, E = logits_NE.shape
    score_NE = torch.sigmoid(logits_NE)
    with torch.no_grad():
        biased_NE = (logits_NE if select_on_logits else score_NE) + bias_E
        ranked = biased_NE.sort(dim=1, descending=True, stable=True)
        idx_NA = ranked.indices[:, :top_k]
        cutoff_N = ranked.values[:, min(top_k, E - 1)]
    weight_NA = score_NE.gather(1, idx_NA)
    weight_NA = weight_NA / (weight_NA.sum(-1, keepdim=True) + 1e-20) * scale
    with torch.no_grad():
        real_N = torch.ones(N, dtype=torch.bool, device=logits_NE.device) if token_mask_N is None else token_mask_N
        count_E = torch.zeros(E, dtype=torch.int64, device=logits_NE.device)
        count_E.scatter_add_(0, idx_NA.reshape(-1), real_N.long()[:, None].expand_as(idx_NA).reshape(-1))
        histogram_EB = None
        if bins:
            low, high = bias_E.min() - 1, bias_E.max() + 1
            # A NaN score has no bin; as an index it would take the process down before the loss can report it.
            bin_NE = ((cutoff_N[:, None] - score_NE - low) / ((high - low) / bins)).floor().nan_to_num_(0).clamp_(0, bins - 1).long()
            bin_NE += torch.arange(E, device=bin_NE.device) * bins
            histogram_EB = torch.zeros(E * bins, dtype=torch.int32, device=bin_NE.device)
            histogram_EB.scatter_add_(0, bin_NE.reshape(-1), real_N.int()[:, None].expand_as(bin_NE).reshape(-1))
            histogram_EB = histogram_EB.view(E, bins)
        idx_NA = idx_NA.masked_fill(~real_N[:, None], -1)
    return Routed(idx_NA, weight_NA, cutoff_N, count_E, histogram_EB)
