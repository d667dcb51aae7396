"""The router's product, in fp32 whatever its inputs: the contract."""

from __future__ import annotations

import torch

from megamoe.ops.backends import cuda_backend
from megamoe.ops.registry import choose, register

OP = "router_logits"


def router_logits(x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x W^T with products and sums in fp32 (float64 for float64 inputs).

    Args:
        x_ND: (N, D) any float dtype. weight_ED: (E, D) any float dtype.

    Returns: (N, E) fp32, or float64. Gradients reach x and the weight in their own dtypes, each rounded once.

    Raises:
        ValueError: shapes that do not fit.

    No collective, no host sync. Twin: reference.py. `split` computes the same from exact bf16 pieces on tensor cores.
    """
    validate(x_ND, weight_ED)
    op = choose(OP, device=x_ND.device.type, dtype=x_ND.dtype, D=x_ND.shape[1], E=weight_ED.shape[0])
    return op(x_ND, weight_ED)


def validate(x_ND, weight_ED) -> None:
    """Check the contract without touching the device."""
    if x_ND.dim() != 2 or weight_ED.dim() != 2 or x_ND.shape[1] != weight_ED.shape[1]:
        raise ValueError(f"router_logits: x {tuple(x_ND.shape)} and weight {tuple(weight_ED.shape)} must be (N, D) and (E, D)")


def _load_reference():
    from megamoe.ops.router_logits.reference import router_logits

    return router_logits


register(OP, "split", **cuda_backend("megamoe.ops.router_logits.split"))
register(OP, "reference", load=_load_reference)
