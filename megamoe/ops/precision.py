"""The one rule about the precision inside an op: fp32, unless its inputs are float64, then float64 throughout."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmaxes, gates, scores and sums are computed for inputs of `dtype`.

    float64 stays float64, so that proofs at 1e-10 exercise the very code that trains.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
