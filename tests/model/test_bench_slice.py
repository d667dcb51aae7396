"""The slice bench trains what it says: every gradient lands in the buffer, and only the first owner's weights move.

Why: a bench that loses the gradients of a stack, or updates everything, times another step than ZeRO-1's. Not covered: speed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench_slice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_matrix_gets_a_gradient_and_only_owner_zero_moves(dtype):
    s = bench_slice.Slice(bench_slice.slice_config("tiny", 8), device=torch.device("cpu"), tokens=48, bank=2, owners=4, recompute="none", dtype=dtype)
    s.micro_batch()
    muon = s.muon
    assert all(muon._view(muon.grad_flat.narrow(0, u.owner * muon.part_numel, muon.part_numel), u).any() for u in muon.units)
    before = {u: muon._weight(u).clone() for u in muon.units}
    s.optimizer.step(0.01)
    assert len({u.owner for u in muon.units}) == 4
    for u in muon.units:
        assert torch.equal(before[u], muon._weight(u)) == (u.owner != 0), muon.params[u.index].megamoe.name
    assert not muon.grad_flat.any()
