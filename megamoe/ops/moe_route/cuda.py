"""Routing on the GPU: the Python side of csrc/moe_routing. Two passes over the logits, the second out of cache."""

from __future__ import annotations

import importlib.util

import torch

from megamoe.ops.moe_route import Routed

MAX_EXPERTS, MAX_CHOSEN, MAX_BINS = 1024, 31, 1700  # of csrc/moe_routing


def why_not(*, device="cuda", dtype=torch.float32, E=1, A=1, B=0, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "no CUDA device here"
    if dtype != torch.float32:
        return f"it computes in fp32, not {dtype}"
    if E > MAX_EXPERTS or A > MAX_CHOSEN or B > MAX_BINS:
        return f"takes at most {MAX_EXPERTS} experts, {MAX_CHOSEN} of them per token and {MAX_BINS} bins, got {E}, {A}, {B}"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is built for Hopper (sm_90)"
    if importlib.util.find_spec("megamoe._C") is None:
        return "the CUDA extension is not built: pip install -e . --no-build-isolation with nvcc 13"
    return None


def route(logits_NE, bias_E, *, top_k, scale=1.0, select_on_logits=False, token_mask_N=None, bins=0):
    """See the contract in `megamoe.ops.moe_route`. fp32 logits on a GPU. Scores equal torch's sigmoid bit for bit."""
    logits_NE, bias_E = logits_NE.contiguous(), bias_E.contiguous()
    idx_NA, weight_NA, cutoff_N, count_E = _Route.apply(logits_NE, bias_E, token_mask_N, top_k, scale, select_on_logits)
    histogram_EB = torch.ops.megamoe.moe_histogram(logits_NE.detach(), bias_E, cutoff_N, token_mask_N, bins) if bins else None
    return Routed(idx_NA, weight_NA, cutoff_N, count_E, histogram_EB)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NE, bias_E, token_mask_N, top_k, scale, select_on_logits):
        idx_NA, weight_NA, cutoff_N, count_E = torch.ops.megamoe.moe_route(logits_NE, bias_E, token_mask_N, top_k, scale, select_on_logits)
        ctx.scale = scale
        ctx.save_for_backward(logits_NE, idx_NA)
        ctx.mark_non_differentiable(idx_NA, cutoff_N, count_E)
        return idx_NA, weight_NA, cutoff_N, count_E

    @staticmethod
    def backward(ctx, _, dweight_NA, *__):
        logits_NE, idx_NA = ctx.saved_tensors
        return torch.ops.megamoe.moe_route_bwd(dweight_NA.contiguous(), logits_NE, idx_NA, ctx.scale), None, None, None, None, None


def load():
    """Load the extension and return the callable."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    return route
