"""Markers and seeds of the whole suite.

`gpu` tests need a Hopper card: on a machine without one they are deselected, not skipped, and the count is printed,
so that a skip in the closing line always means a missing piece.
"""

from __future__ import annotations

import os

if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Triton kernels run in Triton's interpreter. Before anything imports triton, and not where there is a GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Ranks of a test share few cores: threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (sm_90); deselected where there is none")
    config.addinivalue_line("markers", "slow: longer than the CI budget; run with -m slow")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    kept = [i for i in items if "gpu" not in i.keywords]
    deselected = [i for i in items if "gpu" in i.keywords]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
