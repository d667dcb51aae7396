"""An `apex` on the machine is used only where it really offers the named feature and agrees with torch.

Why it matters: PyPI's apex is an unrelated web toolkit under the same import name, and a broken build of the right one
imports well and computes nonsense. Stand-in modules play every case on the CPU.
Not covered: NVIDIA's apex itself, which is not installed here.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from megamoe.utils import features
from megamoe.utils.features import fused_adamw, probe


@pytest.fixture
def apex(monkeypatch):
    """Installs a stand-in: `apex({"optimizers": {"FusedAdam": …}})`."""

    def install(parts):
        root = types.ModuleType("apex")
        root.__path__ = []
        monkeypatch.setitem(sys.modules, "apex", root)
        for path, names in parts.items():
            module = root
            for depth, part in enumerate(path.split("."), 1):
                name = "apex." + ".".join(path.split(".")[:depth])
                child = types.ModuleType(name)
                child.__path__ = []
                monkeypatch.setitem(sys.modules, name, child)
                setattr(module, part, child)
                module = child
            for attribute, value in names.items():
                setattr(module, attribute, value)

    return install


class WrongAdam(torch.optim.AdamW):
    """Decays twice as fast."""

    def __init__(self, params, weight_decay, **kwargs):
        super().__init__(params, weight_decay=2 * weight_decay, **kwargs)


class CrashingAdam:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("no kernel image\nfor this device")


def test_without_a_gpu_apex_is_not_asked(apex):
    apex({"optimizers": {"FusedAdam": CrashingAdam}})
    assert [f.taken for f in probe("cpu")] == ["torch"]


@pytest.mark.parametrize(
    ("parts", "taken", "reason"),
    [
        (None, "torch", "apex is not installed"),
        ({}, "torch", "this apex has no apex.optimizers"),
        ({"optimizers": {}}, "torch", "this apex has no apex.optimizers.FusedAdam"),
        ({"optimizers": {"FusedAdam": CrashingAdam}}, "torch", "apex fails: no kernel image for this device"),
        ({"optimizers": {"FusedAdam": WrongAdam}}, "torch", "disagrees"),
        ({"optimizers": {"FusedAdam": torch.optim.AdamW}}, "apex", "agrees"),
    ],
    ids=["absent", "web toolkit", "no feature", "crashes", "wrong numbers", "right"],
)
def test_adamw(apex, parts, taken, reason):
    if parts is not None:
        apex(parts)
    feature = fused_adamw("cpu", gpu=True)
    assert feature.taken.split()[0] == taken and reason in feature.reason and "\n" not in feature.reason
    assert feature.row() == (feature.name, feature.taken, feature.reason)


def test_the_adamw_taken_really_steps():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    fused_adamw("cpu").build([weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    assert torch.allclose(weight, torch.full((3,), 0.9))


def test_an_apex_that_breaks_on_import_is_a_reason(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.11: cannot open shared object file")

    monkeypatch.setattr(features.importlib, "import_module", broken)
    feature = fused_adamw("cpu", gpu=True)
    assert feature.taken.startswith("torch") and "libcudart" in feature.reason
