"""How a backend that lives in its own module is registered without importing that module before it is chosen.

    register(OP, "triton", **triton_backend("megamoe.ops.rms_norm.triton", "rms_norm"))
    register(OP, "cuda", **cuda_backend("megamoe.ops.attn_res_mix.cuda"))
"""

from __future__ import annotations

import importlib
import importlib.util

import torch


def triton_backend(module: str, function: str) -> dict:
    """`load` and `why_not` of a module that imports triton and has `function` and `why_not`.

    The device is judged first: on CPU tensors triton is not even looked for.
    """

    def why_not(*, device: str = "cuda", **facts) -> str | None:
        if device != "cuda":
            return f"tensors are on {device}, not on a GPU"
        if not torch.cuda.is_available():
            return "no CUDA device here"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return importlib.import_module(module).why_not(device=device, **facts)

    return {"load": lambda: getattr(importlib.import_module(module), function), "why_not": why_not}


def cuda_backend(module: str) -> dict:
    """`load` and `why_not` of a module over `megamoe._C`; it has functions of these names and imports torch alone."""
    return {"load": lambda: importlib.import_module(module).load(), "why_not": lambda **facts: importlib.import_module(module).why_not(**facts)}
