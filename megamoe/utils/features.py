"""Optional fast parts of other packages, found by what they offer and not by their name.

`apex` on PyPI is an unrelated web toolkit of 2013 under the name that NVIDIA's apex is imported by, so it is never a
requirement, and importing it proves nothing: a feature is taken only where the named class is really there *and* agrees
with torch on a tiny problem on this device. Otherwise torch's own counterpart serves, and the first screen says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """What became of one optional part.

    Attributes:
        name: what it does: `fused AdamW`. (Norms and the like are ops with backends of their own: see `ops.registry`.)
        taken: who does it: `apex`, `torch fused`, `torch`.
        reason: in words, why not the first choice, or what was checked.
        build: the class taken, called as (parameters or groups, lr=…, betas=…, eps=…, weight_decay=…).
    """

    name: str
    taken: str
    reason: str
    build: Callable

    def row(self) -> tuple[str, str, str]:
        """For the first screen."""
        return self.name, self.taken, self.reason


def probe(device: str) -> list[Feature]:
    """Every optional feature on a device (`cpu` or `cuda`). Imports torch; on a GPU it syncs the host once per check."""
    return [fused_adamw(device)]


def fused_adamw(device: str, *, gpu: bool | None = None) -> Feature:
    """AdamW in one kernel: apex's FusedAdam, else torch's fused AdamW on a GPU, else torch's AdamW.

    `gpu` says whether apex may be asked; None reads it off the device.
    """
    import functools

    import torch

    found, why = _find("apex.optimizers", "FusedAdam", device.startswith("cuda") if gpu is None else gpu)
    if found is not None:
        why = _disagreement(lambda: _adamw_steps(found, device), lambda: _adamw_steps(torch.optim.AdamW, device))
        if why is None:
            return Feature("fused AdamW", "apex", "apex.optimizers.FusedAdam agrees with torch", found)
    if device.startswith("cuda"):
        return Feature("fused AdamW", "torch fused", why, functools.partial(torch.optim.AdamW, fused=True))
    return Feature("fused AdamW", "torch", why, torch.optim.AdamW)


def _find(module: str, attribute: str, gpu: bool) -> tuple[object | None, str]:
    """The attribute, or None and the reason. An apex whose import itself breaks is a reason, not an error."""
    if not gpu:
        return None, "apex works on GPUs only"
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # noqa: BLE001 - a broken build of an optional package may raise anything
        # `No module named 'apex'` is absent; `No module named 'apex.optimizers'` is the other apex of PyPI.
        absent = isinstance(error, ModuleNotFoundError) and error.name == "apex"
        return None, "apex is not installed" if absent else f"this apex has no {module}: {' '.join(str(error).split())[:120]}"
    return (None, f"this apex has no {module}.{attribute}") if found is None else (found, "")


def _disagreement(theirs: Callable, ours: Callable) -> str | None:
    """None when both give the same numbers, else the reason not to take theirs."""
    import torch

    try:
        got, want = theirs(), ours()
    except Exception as error:  # noqa: BLE001 - see _find
        return f"apex fails: {' '.join(str(error).split())[:120]}"
    if got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=1e-4, atol=1e-5):
        return None
    return "apex disagrees with torch on a small problem"


def _adamw_steps(optimizer_class: Callable, device: str):
    """Two AdamW steps on six numbers."""
    import torch

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, device=device))
    optimizer = optimizer_class([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2):
        weight.grad = torch.linspace(0.5, -0.25, 6, device=device) * step
        optimizer.step()
    return weight.detach()
