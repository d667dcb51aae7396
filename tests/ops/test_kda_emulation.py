"""The CUDA forward's algebra and roundings, run on the CPU, stay within the numerical protocol and inside fp32's range.

Why it matters: CI has no GPU; this tells a wrong kernel from a wrong formula, and shows the anchors' headroom at the gate's
end, where a first public kernel gave 100 % NaN. Not covered: the kernel itself (test_kda_cuda.py), sums' order, backward.
"""

from __future__ import annotations

import pytest
import torch

from megamoe.ops.kda_chunk.emulate_fwd import kda_chunk as emulated
from megamoe.ops.kda_chunk.reference import kda_recurrent

GATES = {
    "uniform": lambda x: x,
    "slow": lambda x: 0.5 * x - 6.2,
    "saturated": lambda x: 0.5 * x + 30,
    "alternating": lambda x: 0.1 * x + torch.where(torch.arange(128) % 2 == 0, 8.0, -8.0),
    "spikes": lambda x: torch.where(x.abs() > 2.5, 8.0, -6.0) + 0.1 * x,
}


def make(lengths, H=2, gate="uniform"):
    T, N = sum(lengths), len(lengths)
    rows = [torch.randn(T, H, 128) for _ in range(4)]
    rows[3] = GATES[gate](rows[3])
    inputs = [x.bfloat16() for x in rows] + [torch.randn(T, H)]
    options = dict(A_log_H=0.3 * torch.randn(H), dt_bias_HK=0.3 * torch.randn(H, 128), initial_state_NHKV=0.1 * torch.randn(N, H, 128, 128),
                   cu_seqlens=torch.tensor([0] + lengths).cumsum(0).to(torch.int32), output_final_state=True)  # fmt: skip
    return inputs, options


def truth(inputs, options):
    double = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    return kda_recurrent(*(x.double() for x in inputs), **double)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("lengths", [[200], [0, 1, 15, 16, 17, 65, 0]], ids=str)
def test_roundings_stay_within_the_protocol(lengths, gate):
    inputs, options = make(lengths, gate=gate)
    largest = {}
    actual, expected = emulated(*inputs, **options, largest=largest), truth(inputs, options)
    for a, b in zip(actual, expected):
        error = (a.double() - b).norm() / b.norm()
        assert torch.isfinite(a).all() and error <= 5e-3, f"{error:.1e}"
        assert (a.double() - b).abs().max() <= 0.05 * b.abs().max()
    # Headroom at the steepest gate: the growing factor reaches 2^93.4 and everything built on it stays far below fp32's 2^128.
    assert max(largest.values()) < 2.0**100, largest


def test_the_steepest_gate_uses_the_headroom_that_the_shift_leaves():
    inputs, options = make([16], gate="saturated")
    largest = {}
    emulated(*inputs, **options, largest=largest)
    assert 2.0**90 < largest["right"] < 2.0**94 and largest["left"] <= 2.0**22


def test_later_tokens_change_no_bit_before_them():
    inputs, options = make([80])
    before, _ = emulated(*inputs, **options)
    for P in (1, 16, 33, 79):
        altered = [torch.cat([x[:P], 3 * torch.randn_like(x[P:])]) for x in inputs]
        after, _ = emulated(*altered, **options)
        assert torch.equal(before[:P], after[:P]), P


@pytest.mark.parametrize("a_log", [20.0, -20.0])
def test_extreme_gate_scales_stay_finite(a_log):
    inputs, options = make([70])
    options["A_log_H"] = torch.full((2,), a_log)
    actual, expected = emulated(*inputs, **options), truth(inputs, options)
    assert (actual[0].double() - expected[0]).norm() <= 5e-3 * expected[0].norm()
