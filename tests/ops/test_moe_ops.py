"""Dispatch, experts and combine equal a loop over experts, whatever the loads; nothing depends on who holds an expert.

Why it matters: routed experts are nearly all the weights, and the errors of this path (a row given to the wrong expert,
a weight of another slot, an idle expert without a gradient) leave the loss looking healthy.

Not covered: GPU backends; the gradient of the router itself (tests/layers/test_moe.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamoe.ops.grouped_mlp import grouped_mlp
from megamoe.ops.moe_dispatch import combine, dispatch
from megamoe.ops.situ_glu import gated_activation
from megamoe.testing.distributed import run_distributed

D, F = 12, 10


def routing(N, A, E, *, kind="random"):
    if kind == "one":  # everybody to experts 0 … A-1: all others idle
        idx = torch.arange(A).expand(N, A).contiguous()
    else:
        idx = torch.rand(N, E).topk(A, dim=1).indices
    if kind == "holes":
        idx[::3, 0] = -1
        idx[1::4] = -1
    return idx, torch.rand(N, A, dtype=torch.float64, requires_grad=True)


def weights(E):
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((E, F, D), (E, F, D), (E, D, F))]


def through_the_ops(x, idx, p, w, group=None, num_experts=None):
    rows, count, handle = dispatch(x, idx, p, group=group, num_experts=num_experts or w[0].shape[0])
    return combine(grouped_mlp(rows, count, *w, act="situ"), handle), count


def by_a_loop(x, idx, p, w):
    y = torch.zeros_like(x)
    for e in range(w[0].shape[0]):
        token, slot = (idx == e).nonzero(as_tuple=True)
        hidden = gated_activation(x[token] @ w[0][e].T, x[token] @ w[1][e].T, act="situ")
        y = y.index_add(0, token, p[token, slot, None] * (hidden @ w[2][e].T))
    return y


@pytest.mark.parametrize("N,A,E,kind", [(40, 3, 8, "random"), (40, 3, 8, "holes"), (16, 2, 8, "one"), (1, 1, 2, "random"), (0, 2, 4, "random")])
def test_matches_a_loop_over_experts_with_every_gradient(N, A, E, kind):
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    (idx, p), w = routing(N, A, E, kind=kind), weights(E)
    upstream = torch.randn(N, D, dtype=torch.float64)
    got, count = through_the_ops(x, idx, p, w)
    expected = by_a_loop(x, idx, p, w)
    assert count.tolist() == [(idx == e).sum().item() for e in range(E)]
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    grads = [torch.autograd.grad(y, [x, p, *w], upstream, materialize_grads=True) for y in (got, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("N", [0, 6])
def test_idle_experts_get_exact_zero_gradients(N):
    """Zero, not missing: an optimizer or a reduction that skips a parameter on one rank only would diverge."""
    x = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    (idx, p), w = routing(N, 2, 8, kind="one"), weights(8)
    through_the_ops(x, idx, p, w)[0].sum().backward()
    for weight in w:
        assert weight.grad is not None and not weight.grad[2:].any()
        assert N == 0 or weight.grad[:2].abs().sum() > 0


def test_dispatch_then_combine_is_identity():
    """With the experts left out and weights that sum to one in binary, bit for bit."""
    x = torch.randn(50, D)
    idx = routing(50, 4, 16)[0]
    rows, _, handle = dispatch(x, idx, torch.full((50, 4), 0.25), group=None, num_experts=16)
    assert torch.equal(combine(rows, handle), x)


def test_order_of_slots_changes_no_bit():
    """Sums run in expert order, not in the order in which the router happened to list the experts."""
    x, (idx, p), w = torch.randn(30, D), routing(30, 4, 8), [x.detach().float() for x in weights(8)]
    p = p.detach().float()
    shuffle = torch.rand(30, 4).argsort(1)
    a = through_the_ops(x, idx, p, w)[0]
    b = through_the_ops(x, idx.gather(1, shuffle), p.gather(1, shuffle), w)[0]
    assert torch.equal(a, b)


def test_rows_past_the_counts_are_inert():
    """Empty slots travel as zero rows at the end; what an expert backend leaves there must not reach a token."""
    x, (idx, p) = torch.randn(12, D, dtype=torch.float64), routing(12, 2, 4, kind="holes")
    rows, count, handle = dispatch(x, idx, p, group=None, num_experts=4)
    used = int(count.sum())
    assert used < rows.shape[0] and not rows[used:].any()
    out = torch.randn_like(rows)
    y = combine(out, handle)
    disturbed = out.clone()
    disturbed[used:] = 1e30
    assert torch.equal(combine(disturbed, handle), y)
    assert not y[(idx < 0).all(1)].any()


def _rank_of_two(seed):
    dist.init_process_group("gloo")
    rank, E = dist.get_rank(), 6
    torch.manual_seed(seed)
    N = 20
    x, (idx, p), w = torch.randn(N, D, dtype=torch.float64), routing(N, 3, E, kind="holes"), weights(E)
    idx[:5] = torch.tensor([0, 1, -1])  # skewed towards rank 0's experts
    upstream = torch.randn(N, D, dtype=torch.float64)
    p = p.detach()
    # Rank 0 holds 14 tokens, rank 1 holds 6; the third case leaves rank 1 with none.
    results = []
    for cut in (14, N):
        mine = slice(0, cut) if rank == 0 else slice(cut, N)
        x_mine, p_mine = x[mine].clone().requires_grad_(), p[mine].clone().requires_grad_()
        w_mine = [t.detach()[rank * 3 : rank * 3 + 3].clone().requires_grad_() for t in w]
        y, count = through_the_ops(x_mine, idx[mine].contiguous(), p_mine, w_mine, group=dist.group.WORLD, num_experts=E)
        y.backward(upstream[mine])
        results.append([y.detach(), count, x_mine.grad, p_mine.grad, *[t.grad for t in w_mine]])
    dist.destroy_process_group()
    return results


def test_two_ranks_match_one():
    """Expert parallelism moves rows; it computes nothing differently, also with uneven ranks and with an empty one."""
    (a14, a20), (b6, b0) = run_distributed(_rank_of_two, 2, 5)
    torch.manual_seed(5)
    N, E = 20, 6
    x, (idx, p), w = torch.randn(N, D, dtype=torch.float64, requires_grad=True), routing(N, 3, E, kind="holes"), weights(E)
    idx[:5] = torch.tensor([0, 1, -1])
    upstream = torch.randn(N, D, dtype=torch.float64)
    p = p.detach().requires_grad_()
    y, count = through_the_ops(x, idx, p, w)
    y.backward(upstream)
    for r0, r1 in ((a14, b6), (a20, b0)):
        assert torch.equal(torch.cat([r0[1], r1[1]]), count)
        for got0, got1, expected in zip(r0[:1] + r0[2:4], r1[:1] + r1[2:4], (y, x.grad, p.grad)):
            torch.testing.assert_close(torch.cat([got0, got1]), expected, atol=1e-14, rtol=0)
        for got0, got1, weight in zip(r0[4:], r1[4:], w):
            torch.testing.assert_close(torch.cat([got0, got1]), weight.grad, atol=1e-12, rtol=0)


def test_wrong_inputs_are_named():
    x, (idx, p), w = torch.randn(4, D), routing(4, 2, 4), weights(4)
    with pytest.raises(ValueError, match=r"expert ids .* must lie in -1 … 2"):
        dispatch(x, torch.full_like(idx, 3), p, group=None, num_experts=3)
    with pytest.raises(ValueError, match="int64"):
        dispatch(x, idx.int(), p, group=None, num_experts=4)
    with pytest.raises(ValueError, match="count has shape"):
        grouped_mlp(x.double(), torch.zeros(3, dtype=torch.int32), *w, act="situ")
    with pytest.raises(ValueError, match="act='gelu'"):
        grouped_mlp(x.double(), torch.zeros(4, dtype=torch.int32), *w, act="gelu")
