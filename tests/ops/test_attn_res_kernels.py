"""The fast AttnRes mixes compute the mix, and every gradient of it, as float64 autograd does.

Why: the mix runs twice in every layer and its gradient reaches every earlier row; an error in one row's gradient would look
like slow training, not like a bug. The CUDA part needs a Hopper GPU; the Triton part runs on Triton's interpreter anywhere.
Not covered: speed (tools/bench_moe.py), rows past 2^31 elements.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from megamoe.ops.attn_res_mix import lean, reference

HAVE_TRITON = importlib.util.find_spec("triton") is not None


def cuda_mix():
    from megamoe.ops.attn_res_mix import cuda

    reason = cuda.why_not()
    if reason:
        pytest.skip(f"attn_res_mix cuda: {reason}")
    return cuda.load()


def inputs(n, T, D, device, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    rows = [(torch.randn(T, D, generator=gen) * (i + 1)).to(device, dtype).requires_grad_() for i in range(n)]
    query = (0.1 * torch.randn(D, generator=gen)).to(device).requires_grad_()
    weight = torch.rand(D, generator=gen).to(device).requires_grad_()
    return rows, query, weight, torch.randn(T, D, generator=gen).to(device, dtype)


def run(op, rows, query, weight, do):
    leaves = [*rows, query, weight]
    out = op(rows, query, weight)
    return out, torch.autograd.grad(out, leaves, do)


def float64_of(rows, query, weight, do):
    wide = [x.detach().double().requires_grad_() for x in (*rows, query, weight)]
    return run(reference.attn_res_mix, wide[:-2], wide[-2], wide[-1], do.double())


def error(x, ref):
    return ((x.double() - ref).norm() / ref.norm().clamp(min=1e-30)).item()


@pytest.mark.gpu
@pytest.mark.parametrize("n, T, D", [(1, 5, 64), (2, 133, 1024), (9, 300, 7168), (14, 140, 7168), (3, 1, 10752), (16, 7, 512), (4, 265, 3592)])
def test_cuda_mix_and_every_gradient_match_float64(n, T, D):
    mix = cuda_mix()
    rows, query, weight, do = inputs(n, T, D, "cuda")
    out, grads = run(mix, rows, query, weight, do)
    ref, ref_grads = float64_of(rows, query, weight, do)
    plain, plain_grads = run(lean.attn_res_mix, rows, query, weight, do)
    assert error(out, ref) <= 1.05 * error(plain, ref) + 1e-6
    for i, (g, r, p) in enumerate(zip(grads, ref_grads, plain_grads)):
        assert torch.isfinite(g).all()
        if n == 1 and i >= n:  # one row: the softmax is constant and so is its gradient, zero up to rounding
            assert g.abs().max() <= 1e-3
        else:
            assert error(g, r) <= 1.05 * error(p, r) + 1e-5, f"gradient {i}"


@pytest.mark.gpu
def test_cuda_mix_gives_the_same_bits_twice_and_leaves_inputs_alone():
    mix = cuda_mix()
    rows, query, weight, do = inputs(9, 1000, 7168, "cuda", seed=1)
    before = [row.clone() for row in rows]
    first = run(mix, rows, query, weight, do)
    second = run(mix, rows, query, weight, do)
    assert torch.equal(first[0], second[0]) and all(torch.equal(a, b) for a, b in zip(first[1], second[1]))
    assert all(torch.equal(a, b) for a, b in zip(before, rows))


@pytest.mark.gpu
def test_cuda_mix_skips_rows_that_want_no_gradient_and_takes_no_tokens():
    mix = cuda_mix()
    rows, query, weight, do = inputs(4, 50, 256, "cuda", seed=2)
    full = run(mix, rows, query, weight, do)[1]
    frozen = [rows[0].detach(), *rows[1:]]
    out = mix(frozen, query, weight)
    some = torch.autograd.grad(out, [*rows[1:], query, weight], do)
    assert all(torch.equal(a, b) for a, b in zip(full[1:], some))
    rows, query, weight, do = inputs(3, 0, 256, "cuda")
    out, grads = run(mix, rows, query, weight, do)
    assert out.shape == (0, 256) and grads[-1].abs().max() == 0 and grads[-2].abs().max() == 0


@pytest.mark.gpu
def test_cuda_mix_replays_in_a_graph():
    mix = cuda_mix()
    rows, query, weight, do = inputs(5, 400, 1024, "cuda", seed=3)
    out, (*drows, dquery, _) = run(mix, rows, query, weight, do)
    rows, u = [row.detach() for row in rows], (query * weight).detach()

    def call():
        out, rv = torch.ops.megamoe.attn_res_mix_fwd(rows, u, 1e-5)
        return out, *torch.ops.megamoe.attn_res_mix_bwd(do, rows, u, rv, 2**5 - 1)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_again, drows_again, du = call()
    out_again.zero_()
    graph.replay()
    assert torch.equal(out_again, out) and all(torch.equal(a, b) for a, b in zip(drows_again, drows))
    assert torch.equal(du * weight, dquery)


@pytest.mark.skipif(not HAVE_TRITON, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 to run Triton kernels on CPU")
@pytest.mark.parametrize("n, T, D", [(1, 5, 70), (3, 7, 64), (9, 5, 200), (12, 3, 64)])
def test_triton_mix_and_every_gradient_match_float64_on_the_interpreter(n, T, D):
    from megamoe.ops.attn_res_mix import triton as kernels

    rows, query, weight, do = inputs(n, T, D, "cpu", torch.float32)
    ref, ref_grads = float64_of(rows, query, weight, do)
    with torch.no_grad():
        out, rv = kernels.mix_fwd(rows, query, weight, 1e-5, programs=2)
        drows, dquery, dweight = kernels.mix_bwd(rows, query, weight, rv, do, [True] * n, programs=2)
    assert error(out, ref) < 1e-6
    for g, r in zip((*drows, dquery, dweight), ref_grads):
        assert error(g, r) < 5e-6 or (n == 1 and g.abs().max() < 1e-4)
