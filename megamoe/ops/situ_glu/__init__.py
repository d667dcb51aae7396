"""The gated activation of every MLP: SiTU-GLU (bounded) or SwiGLU."""

from __future__ import annotations

import torch

from megamoe.ops.backends import triton_backend
from megamoe.ops.registry import choose, register

OP = "situ_glu"

ACTIVATIONS = ("situ", "silu")


def gated_activation(gate: torch.Tensor, up: torch.Tensor, *, act: str, beta: float = 4.0, linear_beta: float = 25.0) -> torch.Tensor:
    """Elementwise gate * up, computed in fp32 and cast back.

        situ: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)      |result| < beta * linear_beta
        silu: gate sigmoid(gate) * up

    Args:
        gate, up: same shape and dtype, any float dtype.
        act: `situ` or `silu`.
        beta, linear_beta: the two bounds of situ; silu ignores them.

    Returns: same shape and dtype as `gate`.

    Raises:
        ValueError: unknown `act`, or shapes that differ.

    No collective, no host sync. Source: arXiv:2607.24653 Eq. 12 (situ), arXiv:2002.05202 (silu); code ours. Twin: reference.py.
    """
    validate_act(act)
    if gate.shape != up.shape:
        raise ValueError(f"gated_activation: gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    return choose(OP, device=gate.device.type, dtype=gate.dtype)(gate, up, act=act, beta=beta, linear_beta=linear_beta)


def validate_act(act: str) -> None:
    """Raise ValueError for an activation nobody implements."""
    if act not in ACTIVATIONS:
        raise ValueError(f"act={act!r}: choose one of {', '.join(ACTIVATIONS)}")


def _load():
    from megamoe.ops.situ_glu.reference import gated_activation

    return gated_activation


register(OP, "triton", **triton_backend("megamoe.ops.situ_glu.triton", "gated_activation"))
register(OP, "reference", load=_load)
