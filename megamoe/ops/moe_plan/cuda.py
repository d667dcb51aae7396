"""The planner on the GPU: the Python side of csrc/moe_routing/smxx_moe_plan.cu. One launch, no host sync."""

from __future__ import annotations

import importlib.util

import torch

from megamoe.ops.moe_plan import Plan

MAX_RANKS, MAX_EXPERTS = 64, 1024  # of csrc/moe_routing/plan.h


def why_not(*, device="cuda", E=1, P=1, **_) -> str | None:
    """Why this kernel cannot serve a call site, in words, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "counts are not on a GPU" if device != "cuda" else "no CUDA device here"
    if E > MAX_EXPERTS or P > MAX_RANKS:
        return f"takes at most {MAX_EXPERTS} experts on {MAX_RANKS} ranks, got {E} on {P}"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is built for Hopper (sm_90)"
    if importlib.util.find_spec("megamoe._C") is None:
        return "the CUDA extension is not built: pip install -e . --no-build-isolation with nvcc 13"
    return None


def plan(count_E, ranks):
    """See the contract in `megamoe.ops.moe_plan`."""
    return Plan(*torch.ops.megamoe.moe_plan(count_E.int().contiguous(), ranks))


def load():
    """Load the extension and return the callable."""
    import megamoe._C  # noqa: F401  registers torch.ops.megamoe.*

    return plan
