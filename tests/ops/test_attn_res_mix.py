"""Attention over depth: the backend that trains equals the plain one, and both equal the two-phase form.

Why it matters: the mix feeds every sublayer, its backward is written by hand, and the two-phase form is what fused
kernels and inference will be held to. Not covered: GPU backends (none yet), the place of rows in the layer loop
(tests/model/test_transformer.py).
"""

from __future__ import annotations

import pytest
import torch

from megamoe.ops.attn_res_mix import attn_res_mix, lean, reference
from megamoe.ops.attn_res_mix.two_phase import bank_stats, merge

D = 24


def rows_of(n, T=9, dtype=torch.float64):
    return [torch.randn(T, D, dtype=dtype, requires_grad=True) for _ in range(n)]


def vectors(dtype=torch.float64):
    return torch.randn(D, dtype=dtype, requires_grad=True), torch.randn(D, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_lean_matches_reference_with_every_gradient(n):
    rows, (query, weight) = rows_of(n), vectors()
    upstream = torch.randn(9, D, dtype=torch.float64)
    results = []
    for fn in (reference.attn_res_mix, lean.attn_res_mix):
        out = fn(rows, query, weight, eps=1e-5)
        results.append((out, *torch.autograd.grad(out, [query, weight, *rows], upstream)))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a, atol=1e-12, rtol=1e-12)


def test_lean_backward_is_the_derivative():
    """Against finite differences, so that an error shared with autograd of the reference would show."""
    rows, (query, weight) = rows_of(3, T=3), vectors()
    assert torch.autograd.gradcheck(lambda q, w, *r: lean.attn_res_mix(r, q, w, eps=1e-5), (query, weight, *rows))


def test_zero_query_is_the_mean_of_the_rows():
    rows, (_, weight) = rows_of(4), vectors()
    got = attn_res_mix(rows, torch.zeros(D, dtype=torch.float64), weight)
    torch.testing.assert_close(got, torch.stack(rows).mean(0), atol=1e-13, rtol=0)


def test_one_row_passes_unchanged_and_gives_exact_zero_to_its_query():
    """Layer 0's first mix: its parameters are in the release, stay in the graph, and must not drift."""
    (row,), (query, weight) = rows_of(1, dtype=torch.float32), vectors(torch.float32)
    out = attn_res_mix([row], query, weight)
    out.sum().backward()
    assert torch.equal(out, row) and torch.equal(row.grad, torch.ones_like(row))
    assert not query.grad.any() and not weight.grad.any()


def test_two_phases_match_the_mix():
    bank, prefix = rows_of(4), rows_of(1)[0]
    queries, weights = torch.randn(2, 3, D, dtype=torch.float64)
    stats = bank_stats(bank, queries, weights)
    for q in range(3):
        expected = attn_res_mix([*bank, prefix], queries[q], weights[q])
        torch.testing.assert_close(merge(stats, q, prefix, queries[q], weights[q]), expected, atol=1e-12, rtol=0)


def test_bfloat16_rows_are_mixed_in_float32():
    """Result within one bf16 rounding of the float64 result: nothing was summed in bf16."""
    rows = [torch.randn(64, D).bfloat16() for _ in range(8)]
    query, weight = torch.randn(D), torch.ones(D)
    expected = reference.attn_res_mix([r.double() for r in rows], query, weight)
    got = attn_res_mix(rows, query, weight)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=0.005, rtol=2**-8)


def test_wrong_inputs_are_named():
    rows, (query, weight) = rows_of(2), vectors()
    with pytest.raises(ValueError, match="no rows"):
        attn_res_mix([], query, weight)
    with pytest.raises(ValueError, match="row 1"):
        attn_res_mix([rows[0], rows[1][:4]], query, weight)
    with pytest.raises(ValueError, match="query has shape"):
        attn_res_mix(rows, query[:3], weight)
