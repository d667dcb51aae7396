"""The head and its loss in one op: logits exist for a slice of tokens at a time, forward and backward."""

from __future__ import annotations

import torch

from megamoe.ops.registry import choose, register

OP = "linear_cross_entropy"
IGNORE_LABEL = -100
# Logits alive at once, counted in numbers. On a CPU a slice should stay in the cache (2^19 to 2^22 ran alike, 2^23 10 %
# slower); on a GPU it should fill the card (2^26 fp32 are 256 MiB).
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**26}


def linear_cross_entropy(h_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """loss_t = logsumexp(W h_t) - (W h_t)[label_t], zero where the label is -100.

    Args:
        h_TD: (T, D) normalised hidden states, any float dtype. weight_VD: (V, D) same dtype.
        labels_T: (T,) int64 in [0, V), or -100 for no loss.

    Returns: loss_T, (T,) fp32 (float64 for float64). Not averaged: the caller divides by a global count, once.

    Logits are fp32 also for bf16 inputs; the weight's gradient is summed over slices in fp32 before its one cast.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    No collective, no host sync. Code ours. Twin: reference.py.
    """
    if h_TD.dim() != 2 or weight_VD.dim() != 2 or weight_VD.shape[1] != h_TD.shape[1] or tuple(labels_T.shape) != tuple(h_TD.shape[:1]):
        raise ValueError(f"linear_cross_entropy: h {tuple(h_TD.shape)}, weight {tuple(weight_VD.shape)}, labels {tuple(labels_T.shape)} must be (T, D), (V, D), (T,)")
    if weight_VD.dtype != h_TD.dtype:
        raise ValueError(f"linear_cross_entropy: h is {h_TD.dtype}, weight {weight_VD.dtype}: cast them to one dtype")
    op = choose(OP, device=h_TD.device.type, dtype=h_TD.dtype, V=weight_VD.shape[0], D=weight_VD.shape[1])
    return op(h_TD, weight_VD, labels_T)


def _load(name: str):
    import importlib

    return importlib.import_module(f"megamoe.ops.linear_cross_entropy.{name}").linear_cross_entropy


register(OP, "chunked", load=lambda: _load("chunked"))
register(OP, "reference", load=lambda: _load("reference"))
