"""KDA on the GPU, through the op that training calls, against float64; and the exact properties that no tolerance can hide.

Why it matters: a kernel that leaks a later token, races, or reads past a document by a hair still passes an average.
Limits: the issue's numerical protocol (RMS ratio, and no element off by more than 5 % of its tensor's maximum).
Not covered: speed (tools/bench_ops.py), the backward's tile-by-tile emulation (test_kda_bwd_*.py).
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

from megamoe.ops.kda_chunk import cuda  # noqa: E402
from megamoe.ops.kda_chunk.reference import kda_chunk as reference  # noqa: E402

LIMITS = dict(o=5e-3, final=5e-3, q=8e-3, k=8e-3, v=8e-3, g=1.5e-2, beta=1.5e-2, A_log=8e-3, dt_bias=8e-3, h0=8e-3)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
GATES = {
    "uniform": lambda x: x,
    "slow": lambda x: 0.5 * x - 6.2,  # about -0.01 a token
    "saturated": lambda x: 0.5 * x + 9,  # -5 a token
    "alternating": lambda x: 0.1 * x + torch.where(torch.arange(128) % 2 == 0, 8.0, -8.0),
    "spikes": lambda x: torch.where(x.abs() > 2.5, 8.0, -6.0) + 0.1 * x,
}
MIXTURES = [[1], [15], [16], [17], [63], [64], [65], [200], [0, 64, 1, 0, 17], [65, 200, 0, 16, 130, 15, 0], [1000, 24]]


@pytest.fixture(scope="module")
def kda():
    reason = cuda.why_not()
    if reason:
        pytest.skip(f"needs the cuda backend: {reason}")
    return cuda.load()


def make(lengths, H, gate="uniform", *, beta_dtype=torch.float32, a_log=0.3, states=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    T, N = sum(lengths), len(lengths)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    inputs = dict(q=draw(T, H, 128), k=draw(T, H, 128), v=draw(T, H, 128), g=GATES[gate](draw(T, H, 128)))
    inputs = {name: x.bfloat16() for name, x in inputs.items()}
    inputs |= dict(beta=draw(T, H).to(beta_dtype), A_log=a_log * draw(H), dt_bias=0.3 * draw(H, 128), h0=0.1 * draw(N, H, 128, 128) if states else None)
    weights = draw(T, H, 128).bfloat16().cuda(), 0.1 * draw(N, H, 128, 128).cuda()
    cu = torch.tensor([0] + lengths).cumsum(0).to(torch.int32).cuda()
    return {name: None if x is None else x.cuda() for name, x in inputs.items()}, cu, weights


def run(op, inputs, cu, weights, *, dtype=None, grads=True, **kw):
    leaves = {name: None if x is None else x.detach().to(dtype or x.dtype).requires_grad_(grads) for name, x in inputs.items()}
    o, final = op(*(leaves[n] for n in ("q", "k", "v", "g", "beta")), A_log_H=leaves["A_log"], dt_bias_HK=leaves["dt_bias"], initial_state_NHKV=leaves["h0"],
                  cu_seqlens=cu, output_final_state=True, **kw)  # fmt: skip
    result = dict(o=o.detach(), final=final.detach())
    if grads:
        loss = (o.double() * weights[0].double()).sum() + (final.double() * weights[1].double()).sum()
        wanted = [n for n in NAMES if leaves[n] is not None]
        result |= dict(zip(wanted, torch.autograd.grad(loss, [leaves[n] for n in wanted])))
        z = leaves["g"].detach().double() + (0.0 if leaves["dt_bias"] is None else leaves["dt_bias"].detach().double())
        result["A_log_terms"] = (result["g"].double() * z).square().sum((0, 2)).sqrt()
    return result


def assert_close(actual, expected, names=None):
    for name in names or [n for n in actual if n in LIMITS]:
        a, b = actual[name].double(), expected[name].double()
        assert torch.isfinite(a).all(), name
        if b.numel() == 0:
            continue
        # d A_log sums T·K terms of either sign into one number a head: its rounding is that of the terms, whatever they cancel to.
        scale = torch.maximum(b.abs(), expected["A_log_terms"]) if name == "A_log" else b.abs()
        error, worst = (a - b).norm() / scale.norm().clamp_min(1e-30), (a - b).abs().max() / scale.max().clamp_min(1e-30)
        assert error <= LIMITS[name] and worst <= 0.05, f"{name}: rms {error:.1e} (limit {LIMITS[name]:.0e}), worst element {worst:.1e}"


def assert_same(actual, expected):
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("lengths", MIXTURES, ids=str)
def test_outputs_and_every_gradient_match_float64_for_packed_lengths(kda, lengths):
    case = make(lengths, 3)
    assert_close(run(kda, *case), run(reference, *case, dtype=torch.float64))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("H", [1, 12])
def test_outputs_and_every_gradient_match_float64_for_gate_regimes(kda, gate, H):
    case = make([300, 1237], H, gate)  # enough groups at H = 1, 12 for the segmented scan
    # A saturated gate has gradients at the rounding level of the others: compared where they mean something.
    names = [n for n in ("o", "final", *NAMES) if gate not in ("saturated", "alternating", "spikes") or n not in ("g", "A_log", "dt_bias")]
    actual = run(kda, *case)
    assert_close(actual, run(reference, *case, dtype=torch.float64), names)
    assert all(torch.isfinite(x).all() for x in actual.values())


@pytest.mark.parametrize("a_log", [20.0, -20.0])
def test_extreme_gate_scales_stay_finite_and_close(kda, a_log):
    inputs, cu, weights = make([200, 70], 2)
    inputs["A_log"] = torch.full_like(inputs["A_log"], a_log)
    actual, expected = run(kda, inputs, cu, weights), run(reference, inputs, cu, weights, dtype=torch.float64)
    assert all(torch.isfinite(x).all() for x in actual.values())
    assert_close(actual, expected, ("o", "final", "q", "k", "v", "beta", "h0"))


def test_options_missing_or_in_bf16_match_float64(kda):
    inputs, cu, weights = make([333], 2, beta_dtype=torch.bfloat16, states=False)
    inputs["dt_bias"] = None
    assert_close(run(kda, inputs, None, weights, scale=0.5), run(reference, inputs, None, weights, dtype=torch.float64, scale=0.5))


def test_strided_views_equal_contiguous_inputs_bit_for_bit(kda):
    inputs, cu, weights = make([130, 77], 3)
    fused = torch.cat([inputs[n] for n in ("q", "k", "v", "g")], -1)
    strided = inputs | {n: fused[..., i * 128 : (i + 1) * 128] for i, n in enumerate(("q", "k", "v", "g"))}
    strided["beta"] = torch.stack([inputs["beta"]] * 2, -1)[..., 0]
    flat = torch.cat([torch.zeros(1, device="cuda"), inputs["dt_bias"].flatten()])  # a parameter in a flat buffer, off every vector boundary
    strided["dt_bias"] = flat[1:].view_as(inputs["dt_bias"])
    assert_same(run(kda, strided, cu, weights), run(kda, inputs, cu, weights))


@pytest.mark.parametrize("H", [2, 48], ids=["segmented", "one block a head"])
def test_two_runs_and_graph_replay_give_the_same_bits(kda, H):
    case = make([1500, 0, 700], H)
    once = run(kda, *case)
    assert_same(run(kda, *case), once)
    inputs, cu, weights = case
    args = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    options = dict(A_log_H=inputs["A_log"], dt_bias_HK=inputs["dt_bias"], initial_state_NHKV=inputs["h0"], cu_seqlens=cu, output_final_state=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        o, final = kda(*args, **options)
    for _ in range(2):
        o.fill_(float("nan")), final.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, once["o"]) and torch.equal(final, once["final"])


def test_later_tokens_change_no_bit_before_them(kda):
    inputs, _, weights = make([400], 2, states=False)
    for P in (1, 15, 16, 40, 63, 64, 100, 257):
        results = []
        for change in (False, True):
            altered = {n: None if x is None else x.clone() for n, x in inputs.items()}
            if change:
                for n in ("q", "k", "v", "g", "beta"):
                    altered[n][P:] = 3 * torch.randn_like(altered[n][P:])
            leaves = {n: None if x is None else x.requires_grad_() for n, x in altered.items()}
            o, _ = kda(*(leaves[n] for n in ("q", "k", "v", "g", "beta")), A_log_H=leaves["A_log"], dt_bias_HK=leaves["dt_bias"])
            grads = torch.autograd.grad((o[:P].float() * weights[0][:P].float()).sum(), [leaves[n] for n in ("q", "k", "v", "g", "beta")])
            results.append([o[:P].detach(), *(x[:P] for x in grads)])
        for name, a, b in zip(("o", "q", "k", "v", "g", "beta"), *results):
            assert torch.equal(a, b), f"{name} before {P}"


@pytest.mark.parametrize("H, lengths", [(3, [65, 0, 200, 1, 64, 17]), (40, [65, 0, 200, 1, 64, 17]), (3, [4200, 0, 1025, 70])], ids=["few heads", "many heads", "segments"])
def test_packed_documents_equal_each_alone_bit_for_bit(kda, H, lengths):
    inputs, cu, weights = make(lengths, H)
    together = run(kda, inputs, cu, weights)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone = {name: inputs[name][rows] for name in ("q", "k", "v", "g", "beta")} | dict(A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], h0=inputs["h0"][n : n + 1])
        cu_alone = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        result = run(kda, alone, cu_alone, (weights[0][rows], weights[1][n : n + 1]))
        for name in ("o", "q", "k", "v", "g", "beta"):
            assert torch.equal(result[name], together[name][rows]), (n, name)
        for name in ("final", "h0"):
            assert torch.equal(result[name][0], together[name][n]), (n, name)
        start += length


def test_poisoned_neighbours_and_fresh_memory_do_not_show(kda):
    inputs, cu, weights = make([70, 33], 2)
    expected = run(kda, inputs, cu, weights)
    poisoned = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        x = inputs[name]
        around = torch.full((x.shape[0] + 128, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
        around[64:-64] = x
        poisoned[name] = around[64:-64]
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]  # what the caching allocator hands out next
    del junk
    assert_same(run(kda, poisoned, cu, weights), expected)


def test_segments_match_float64_in_both_directions(kda):
    """Cut at 1,024 rows forward and at 4,096 backward; the slow gate makes states and their gradients cross."""
    case = make([4300, 4200], 2, "slow")
    assert_close(run(kda, *case), run(reference, *case, dtype=torch.float64))


def test_segments_agree_with_one_block_a_head(kda):
    # The same heads alone (few: segmented) and among many (one block a head) differ by rounding only.
    inputs, cu, weights = make([2500], 48, "slow")
    few = {n: x[:, :4].contiguous() if n in ("q", "k", "v", "g", "beta", "h0") else x[:4].contiguous() for n, x in inputs.items()}
    many, alone = run(kda, inputs, cu, weights, grads=False), run(kda, few, cu, (weights[0][:, :4], weights[1][:, :4]), grads=False)
    for name in ("o", "final"):
        a, b = alone[name].double(), many[name][:, :4].double()
        assert (a - b).norm() <= 4e-3 * b.norm(), name


def test_state_does_not_drift_over_64k_tokens(kda):
    inputs, _, weights = make([65536], 2, "slow", states=False)
    cu = torch.tensor([0, 65536], dtype=torch.int32, device="cuda")
    assert_close(run(kda, inputs, cu, weights, grads=False), run(reference, inputs, cu, weights, dtype=torch.float64, grads=False))


def test_offsets_beyond_two_to_the_31_elements(kda):
    T, H = 180_000, 96  # 2.2e9 elements a tensor
    q, k, v, g = (torch.randn(T, H, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    beta, A_log = torch.randn(T, H, device="cuda"), torch.zeros(H, device="cuda")
    cut = T - 1000
    cu = torch.tensor([0, cut, T], dtype=torch.int32, device="cuda")
    o, _ = kda(q, k, v, g, beta, A_log_H=A_log, cu_seqlens=cu)
    tail, _ = kda(q[cut:], k[cut:], v[cut:], g[cut:], beta[cut:], A_log_H=A_log)
    assert torch.equal(o[cut:], tail)


def test_inputs_are_not_written(kda):
    inputs, cu, weights = make([300, 40], 3)
    before = {n: x.clone() for n, x in inputs.items()}
    run(kda, inputs, cu, weights)
    assert_same(inputs, before)


def test_opcheck(kda):
    inputs, cu, _ = make([40, 30], 2)
    args = [*(inputs[n] for n in NAMES), cu, -5.0, 128**-0.5]
    torch.library.opcheck(torch.ops.megamoe.kda_chunk_fwd.default, (*args, True), test_utils=("test_schema", "test_faketensor"))
    gradients = [torch.randn(70, 2, 128, device="cuda").bfloat16(), torch.randn(2, 2, 128, 128, device="cuda")]
    torch.library.opcheck(torch.ops.megamoe.kda_chunk_bwd.default, (*gradients, *args), test_utils=("test_schema", "test_faketensor"))


def fragments_by_affine_maps(op, leaves, borders):
    """What context parallelism does, on one device: each fragment's state (from zero) and map M (identity state, v = 0) come out of the
    op itself, S_in = M S_in + S of the fragments before, and every fragment starts from its S_in. Returns o of all."""
    rows = [[leaves[n][a:b] for n in ("q", "k", "v", "g", "beta")] for a, b in zip(borders, borders[1:])]
    options = dict(A_log_H=leaves["A_log"], dt_bias_HK=leaves["dt_bias"])
    H, dtype = leaves["q"].shape[1], torch.float64 if leaves["q"].dtype == torch.float64 else torch.float32
    entering, outputs = torch.zeros(1, H, 128, 128, dtype=dtype, device=leaves["q"].device), []
    identity = torch.eye(128, dtype=dtype, device=leaves["q"].device).expand(1, H, 128, 128).contiguous()
    for q, k, v, g, beta in rows:
        outputs.append(op(q, k, v, g, beta, initial_state_NHKV=entering, **options)[0])
        own = op(q, k, v, g, beta, output_final_state=True, **options)[1]
        M = op(q, k, torch.zeros_like(v), g, beta, initial_state_NHKV=identity, output_final_state=True, **options)[1]
        entering = M @ entering + own
    return torch.cat(outputs)


def test_fragments_linked_by_affine_maps_equal_the_whole_stream_and_its_gradients(kda):
    """Context parallelism on this backend (parallel/context.py): the state and its gradient cross two borders, at ragged places.
    A slow gate and a short middle fragment, or the map would hardly matter."""
    inputs, _, (weight, _) = make([310], 2, "slow", states=False)
    names = ("q", "k", "v", "g", "beta", "dt_bias")

    def gradients(op, forward, dtype=None):
        leaves = {n: None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for n, x in inputs.items()}
        o = forward(op, leaves)
        return dict(o=o.detach()) | dict(zip(names, torch.autograd.grad((o.double() * weight.double()).sum(), [leaves[n] for n in names])))

    def whole(op, x):
        return op(*(x[n] for n in ("q", "k", "v", "g", "beta")), A_log_H=x["A_log"], dt_bias_HK=x["dt_bias"])[0]

    expected = gradients(reference, whole, torch.float64)
    assert_close(gradients(kda, lambda op, x: fragments_by_affine_maps(op, x, [0, 150, 187, 310])), expected)
