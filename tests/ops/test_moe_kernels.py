"""The MoE kernels route, move and compute as their plain twins do.

Why: a row in a wrong slot, a token counted twice or another expert's row inside a weight gradient changes the model without
raising anything. Not covered: speed (tools/bench_moe.py), links between GPUs, processes that die. GPU parts need a Hopper.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from megamoe.ops import moe_dispatch, moe_route
from megamoe.ops.grouped_mlp import reference as mlp_reference
from megamoe.ops.moe_dispatch import reference as dispatch_reference

HAVE_TRITON = importlib.util.find_spec("triton") is not None
needs_interpreter = pytest.mark.skipif(
    not HAVE_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton and TRITON_INTERPRET=1 (its loops need numpy < 2.4)"
)


def backend(module):
    reason = module.why_not()
    if reason:
        pytest.skip(f"{module.__name__}: {reason}")
    return module.load()


def error(x, ref):
    return ((x.double() - ref.double()).norm() / ref.double().norm().clamp(min=1e-30)).item()


# ---- routing


@pytest.mark.gpu
@pytest.mark.parametrize("N, E, A, bins", [(8192, 896, 16, 1000), (77, 1024, 31, 100), (5, 8, 2, 1000), (64, 16, 16, 0), (0, 128, 8, 50), (1000, 500, 1, 1700)])
@pytest.mark.parametrize("on_logits", [False, True])
def test_routing_chooses_counts_and_bins_as_the_twin(N, E, A, bins, on_logits):
    from megamoe.ops.moe_route import cuda, reference

    route = backend(cuda)
    gen = torch.Generator("cuda").manual_seed(N + E)
    logits = torch.randn(N, E, device="cuda", generator=gen).requires_grad_()
    bias = 0.3 * torch.randn(E, device="cuda", generator=gen)
    mask = torch.rand(N, device="cuda", generator=gen) > 0.1
    kwargs = dict(top_k=A, scale=2.5, select_on_logits=on_logits, token_mask_N=mask, bins=bins)
    got, want = route(logits, bias, **kwargs), reference.route(logits, bias, **kwargs)
    assert torch.equal(got.idx_NA, want.idx_NA)
    assert torch.equal(got.cutoff_N, want.cutoff_N) and torch.equal(got.count_E, want.count_E)
    assert bins == 0 or torch.equal(got.histogram_EB, want.histogram_EB)
    torch.testing.assert_close(got.weight_NA, want.weight_NA, rtol=2e-6, atol=1e-9)
    dweight = torch.randn(N, A, device="cuda", generator=gen) * mask[:, None]
    (a,), (b,) = (torch.autograd.grad(r.weight_NA, [logits], dweight) for r in (got, want))
    if A == 1:  # the weight is score / score: its gradient is zero up to rounding
        assert max(a.abs().max(), b.abs().max()) < 1e-5
    else:
        assert N == 0 or error(a, b) < 2e-6


@pytest.mark.gpu
def test_routing_gives_ties_to_the_lower_id():
    from megamoe.ops.moe_route import cuda

    route = backend(cuda)
    got = route(torch.zeros(9, 896, device="cuda"), torch.zeros(896, device="cuda"), top_k=16)
    assert torch.equal(got.idx_NA.cpu(), torch.arange(16).expand(9, 16))


def test_reference_routing_equals_topk_where_there_are_no_ties():
    torch.manual_seed(0)
    logits, bias = torch.randn(50, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    got = moe_route.route(logits, bias, top_k=4, bins=100)
    top = (torch.sigmoid(logits) + bias).topk(5)
    assert torch.equal(got.idx_NA, top.indices[:, :4]) and torch.equal(got.cutoff_N, top.values[:, 4])
    assert got.count_E.sum() == 200 and (got.histogram_EB.sum(1) == 50).all()


# ---- dispatch and combine


def slots(N, E, A, kind, seed=0):
    """idx (N, A) of one kind, weights (N, A)."""
    gen = torch.Generator().manual_seed(seed)
    if kind == "skewed":  # every token's first choice is expert 0
        idx = torch.stack([torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(E - 1, generator=gen)[: A - 1]]) for _ in range(N)]) if N else torch.zeros(0, A).long()
    else:
        idx = torch.stack([torch.randperm(E, generator=gen)[:A] for _ in range(N)]) if N else torch.zeros(0, A).long()
    if kind == "holes":
        idx[torch.rand(N, A, generator=gen) < 0.3] = -1
    return idx.cuda(), torch.rand(N, A, generator=gen).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("N, E, A, D, kind", [(1000, 896, 16, 3584, "random"), (130, 16, 2, 64, "skewed"), (300, 64, 8, 520, "holes"), (0, 64, 8, 64, "random"), (1, 32, 32, 8, "random")])
def test_dispatch_and_combine_equal_the_reference_forward_and_backward(N, E, A, D, kind):
    from megamoe.ops.moe_dispatch import cuda

    backend(cuda)
    idx, weight = slots(N, E, A, kind)
    x = torch.randn(N, D, device="cuda").bfloat16()
    results = []
    for op in (cuda.dispatch, dispatch_reference.dispatch):
        xs, ws = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rows, count, handle = op(xs, idx, ws, group=None, num_experts=E)
        out = rows * 3
        y = handle.combine(out)
        dy = torch.sin(torch.arange(N * D, device="cuda").float()).view(N, D).bfloat16()
        results.append((rows, count, y, *torch.autograd.grad(y, [xs, ws], dy)))
    for i, (a, b) in enumerate(zip(*results)):
        if i == 4:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * D**0.5)  # dots over D, another order
        else:
            assert torch.equal(a, b), ("rows", "count", "y", "dx")[i]


@pytest.mark.gpu
@pytest.mark.parametrize("P", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", ["random", "skewed", "holes"])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_any_number_of_ranks_moves_the_same_rows_and_sums_the_same_bits(P, kind, deduplicate):
    from megamoe.ops.moe_dispatch import cuda

    backend(cuda)
    from megamoe.ops.moe_dispatch import virtual

    E, A, D, per = 128, 8, 264, [0 if p % 3 == 1 else 150 + p for p in range(P)]
    parts = [slots(n, E, A, kind, seed=p) for p, n in enumerate(per)]
    x = [torch.randn(n, D, device="cuda").bfloat16() for n in per]
    dy = [torch.randn(n, D, device="cuda").bfloat16() for n in per]
    idx, weight = [i for i, _ in parts], [w for _, w in parts]
    many = virtual.dispatch(x, idx, weight, num_experts=E, deduplicate=deduplicate)
    one = virtual.dispatch([torch.cat(x)], [torch.cat(idx)], [torch.cat(weight)], num_experts=E, deduplicate=False)
    # One rank holding all tokens in rank order has the rows of all owners one after the other.
    assert torch.equal(torch.cat(many.rows), one.rows[0]) and torch.equal(torch.cat(many.count), one.count[0])
    experts = [r * 3 for r in many.rows]
    y = torch.cat(virtual.combine(experts, many))
    assert torch.equal(y, virtual.combine([one.rows[0] * 3], one)[0])
    dout, dweight = virtual.combine_bwd(dy, experts, many)
    dout_one, dweight_one = virtual.combine_bwd([torch.cat(dy)], [one.rows[0] * 3], one)
    assert torch.equal(torch.cat(dout), dout_one[0]) and torch.equal(torch.cat(dweight), dweight_one[0])
    assert torch.equal(torch.cat(virtual.dispatch_bwd(dout, many)), virtual.dispatch_bwd(dout_one, one)[0])


@pytest.mark.gpu
def test_dispatch_then_combine_is_identity_and_repeats_bitwise():
    from megamoe.ops.moe_dispatch import cuda

    dispatch = backend(cuda)
    idx, _ = slots(777, 64, 1, "random")
    x = torch.randn(777, 3584, device="cuda").bfloat16()
    for _ in range(3):
        rows, _, handle = dispatch(x, idx, torch.ones(777, 1, device="cuda"), group=None, num_experts=64)
        assert torch.equal(moe_dispatch.combine(rows, handle), x)


@pytest.mark.gpu
def test_dispatch_combine_without_group_never_syncs_the_host():
    from megamoe.ops.moe_dispatch import cuda

    dispatch = backend(cuda)
    idx, weight = slots(256, 64, 4, "random")
    x = torch.randn(256, 512, device="cuda").bfloat16()
    dispatch(x, idx, weight, group=None, num_experts=64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows, _, handle = dispatch(x, idx, weight, group=None, num_experts=64)
        moe_dispatch.combine(rows, handle)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_dispatch_combine_and_gradients_replay_from_a_graph_on_other_tokens():
    """Nothing of one routing may be baked into the launches: a replay on new ids must move the new rows."""
    from megamoe.ops.moe_dispatch import cuda

    dispatch = backend(cuda)
    N, E, A, D = 512, 64, 8, 520

    def fresh(seed):
        gen = torch.Generator("cuda").manual_seed(seed)
        x, dy = (torch.randn(N, D, device="cuda", generator=gen).bfloat16() for _ in range(2))
        return x, *slots(N, E, A, ("holes", "skewed", "random")[seed % 3], seed), dy

    def step(x, idx, weight, dy):
        rows, count, handle = dispatch(x, idx, weight, group=None, num_experts=E)
        y = moe_dispatch.combine(rows * 3, handle)
        return rows, count, y, *torch.autograd.grad(y, [x, weight], dy)

    held = [t.requires_grad_() if t.is_floating_point() else t for t in fresh(0)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*held)
    for seed in range(1, 6):
        new = [t.requires_grad_() if t.is_floating_point() else t for t in fresh(seed)]
        with torch.no_grad():
            for to, t in zip(held, new):
                to.copy_(t)
        graph.replay()
        for name, a, b in zip(("rows", "count", "y", "dx", "dweight"), out, step(*new)):
            assert torch.equal(a, b), (seed, name)


@pytest.mark.gpu
def test_a_hundred_repetitions_have_the_same_bits():
    from megamoe.ops.moe_dispatch import cuda

    backend(cuda)
    from megamoe.ops.moe_dispatch import virtual

    P, E, A, D = 8, 128, 8, 520
    parts = [slots(0 if p == 3 else 300 + p, E, A, ("random", "skewed", "holes")[p % 3], seed=p) for p in range(P)]
    idx, weight = [i for i, _ in parts], [w for _, w in parts]
    x, dy = ([torch.randn(len(i), D, device="cuda").bfloat16() for i in idx] for _ in range(2))

    def once():
        sent = virtual.dispatch(x, idx, weight, num_experts=E, deduplicate=True)
        experts = [r * 3 for r in sent.rows]
        dout, dweight = virtual.combine_bwd(dy, experts, sent)
        return [*sent.rows, *virtual.combine(experts, sent), *dout, *dweight, *virtual.dispatch_bwd(dout, sent)]

    first = once()
    assert all(torch.isfinite(t).all() for t in first)
    for repeat in range(99):
        assert all(torch.equal(a, b) for a, b in zip(once(), first)), repeat


# ---- grouped MLP


@pytest.mark.gpu
@pytest.mark.parametrize("counts, rest, D, F", [([0, 1, 127, 128, 129, 300, 0], 40, 256, 384), ([0, 0, 0], 64, 128, 128), ([700, 3], 0, 264, 200), ([20] * 16, 5, 128, 256)])
@pytest.mark.parametrize("act", ["situ", "silu"])
def test_grouped_mlp_matches_float64_as_closely_as_plain_bf16(counts, rest, D, F, act):
    from megamoe.ops.grouped_mlp import triton as fast

    reason = "no CUDA device here" if not torch.cuda.is_available() else fast.why_not(device="cuda", dtype=torch.bfloat16, D=D, F=F)
    if reason:
        pytest.skip(f"grouped_mlp triton: {reason}")
    torch.manual_seed(0)
    R, E = sum(counts) + rest, len(counts)
    x = torch.randn(R, D, device="cuda").bfloat16()
    ws = [(torch.randn(E, *s, device="cuda") * s[1] ** -0.5 * 2).bfloat16() for s in ((F, D), (F, D), (D, F))]
    dout = torch.randn(R, D, device="cuda").bfloat16()
    dout[sum(counts) :] = float("nan")  # rows of no expert: never read
    count = torch.tensor(counts, dtype=torch.int32, device="cuda")

    def run(op, cast, do):
        leaves = [cast(t).requires_grad_() for t in (x, *ws)]
        out = op(leaves[0], count, *leaves[1:], act=act)
        return [out, *torch.autograd.grad(out, leaves, cast(do))]

    exact = run(mlp_reference.grouped_mlp, lambda t: t.detach().double(), dout.nan_to_num(0))
    plain = run(mlp_reference.grouped_mlp, lambda t: t.detach().clone(), dout.nan_to_num(0))
    got = run(fast.grouped_mlp, lambda t: t.detach().clone(), dout)
    for name, g, p, e in zip(("out", "dx", "dw_gate", "dw_up", "dw_down"), got, plain, exact):
        assert torch.isfinite(g).all(), name
        assert error(g, e) <= 1.5 * error(p, e) + 1e-6, name
    assert got[0][sum(counts) :].abs().sum() == 0 and got[1][sum(counts) :].abs().sum() == 0
    for e, n in enumerate(counts):
        assert n or all(g[e].abs().max() == 0 for g in got[2:])
    again = run(fast.grouped_mlp, lambda t: t.detach().clone(), dout)
    assert all(torch.equal(a, b) for a, b in zip(got, again))


@pytest.mark.gpu
@pytest.mark.parametrize("D, F", [(256, 256), (264, 200)])
def test_weight_gradients_add_into_fp32_main_grads(D, F):
    from megamoe.ops.grouped_mlp import triton as fast

    if not torch.cuda.is_available() or fast.why_not(device="cuda", dtype=torch.bfloat16, D=D, F=F):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    count = torch.tensor([100, 0, 60], dtype=torch.int32, device="cuda")
    x, dout = (torch.randn(160, D, device="cuda").bfloat16() for _ in range(2))
    ws = [(torch.randn(3, *s, device="cuda") / 16).bfloat16().requires_grad_() for s in ((F, D), (F, D), (D, F))]
    want = torch.autograd.grad(fast.grouped_mlp(x, count, *ws, act="situ"), ws, dout)
    for w in ws:
        w.main_grad = torch.ones(w.shape, device="cuda")
    for _ in range(2):
        fast.grouped_mlp(x, count, *ws, act="situ").backward(dout)
    for w, g in zip(ws, want):
        assert w.grad is None and error((w.main_grad - 1) / 2, g) < 4e-3
        assert (w.main_grad[1] == 1).all()


@needs_interpreter
@pytest.mark.parametrize("counts, rest, D, F, act", [([5, 0, 40, 70], 3, 40, 72, "situ"), ([0, 0], 4, 32, 32, "situ"), ([33], 0, 24, 40, "silu"), ([], 0, 16, 16, "situ")])
def test_grouped_mlp_kernels_match_the_twin_on_the_interpreter(counts, rest, D, F, act, monkeypatch):
    from megamoe.ops.grouped_mlp import triton as fast

    monkeypatch.setattr(fast, "rules", lambda R, E: fast.Rules(*(fast.Tile(32, 32, 16, 2, 4, group=2),) * 5))
    torch.manual_seed(0)
    R, E = sum(counts) + rest, max(1, len(counts))
    count = torch.tensor(counts or [0], dtype=torch.int32)
    x = torch.randn(R, D, requires_grad=True)
    ws = [(torch.randn(E, *s) * 0.2).requires_grad_() for s in ((F, D), (F, D), (D, F))]
    do = torch.randn(R, D)
    want = mlp_reference.grouped_mlp(x, count, *ws, act=act)
    got = fast.grouped_mlp(x, count, *ws, act=act)
    pairs = zip((got, *torch.autograd.grad(got, [x, *ws], do)), (want, *torch.autograd.grad(want, [x, *ws], do)))
    assert all(torch.isfinite(a).all() and (error(a, b) < 2e-6 or a.abs().max() == b.abs().max() == 0) for a, b in pairs if a.numel())


def check_runs_of_main_grad(fast, device, dtype, bound):
    D, F, counts = 32, 48, [5, 0, 40, 7, 21]
    torch.manual_seed(0)
    count = torch.tensor(counts, dtype=torch.int32, device=device)
    x, do = (torch.randn(sum(counts) + 3, D, device=device).to(dtype) for _ in range(2))
    ws = [(torch.randn(len(counts), *s, device=device) * 0.2).to(dtype).requires_grad_() for s in ((F, D), (F, D), (D, F))]
    want = torch.autograd.grad(mlp_reference.grouped_mlp(x, count, *ws, act="situ"), ws, do)
    for w in ws:
        w.main_grad = tuple(torch.ones(n, *w.shape[1:], device=device) for n in (2, 1, 2))
    for _ in range(2):
        fast.grouped_mlp(x, count, *ws, act="situ").backward(do)
    for w, g in zip(ws, want):
        assert w.grad is None and error((torch.cat(w.main_grad) - 1) / 2, g) < bound
        assert (w.main_grad[0][1] == 1).all()


@needs_interpreter
def test_weight_gradients_add_into_the_runs_of_experts_that_an_optimizer_hands_out(monkeypatch):
    """Muon's buffer holds the experts of a stack in several places. A launch that took the wrong rows for a run would train
    one expert on another's tokens. The interpreter lacks the copy engine's addition: the launch itself is played here."""
    from megamoe.ops.grouped_mlp import triton as fast

    class Played:
        def __getitem__(self, grid):
            def launch(a_tiles, b_tiles, dw_tiles, a, b, dw, row_start, E, M, N, *, ADD, **_):
                assert ADD and tuple(dw.shape) == (E, M, N)
                for e in range(E):
                    rows = slice(int(row_start[e]), int(row_start[e + 1]))
                    dw[e] += a[rows].T @ b[rows]

            return launch

    monkeypatch.setattr(fast.kernels, "d_weight", Played())
    monkeypatch.setattr(fast, "rules", lambda R, E: fast.Rules(*(fast.Tile(32, 32, 16, 2, 4, group=2),) * 5))
    check_runs_of_main_grad(fast, "cpu", torch.float32, 1e-5)


@pytest.mark.gpu
def test_weight_gradients_add_into_runs_of_experts_on_the_card():
    from megamoe.ops.grouped_mlp import triton as fast

    if not torch.cuda.is_available() or fast.why_not(device="cuda", dtype=torch.bfloat16, D=32, F=48):
        pytest.skip("needs a Hopper GPU")
    check_runs_of_main_grad(fast, "cuda", torch.bfloat16, 2e-2)
