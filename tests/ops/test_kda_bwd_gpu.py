"""The KDA backward on the card: right in every gate regime, and the same bits whenever it must be.

Why: training silently degrades when one gradient of eight is wrong in one regime, and resumption needs the same bits.
Does not cover: the torch op and autograd around it (test_kda_cuda.py), speed (tools/bench_ops.py).
"""

import pytest
import test_kda_bwd_harness as harness
import torch

pytestmark = pytest.mark.gpu
RAGGED = [0, 0, 1, 16, 33, 33, 96, 160, 225, 400]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return harness.gpu_library(tmp_path_factory.mktemp("gpu"))


def on_card(case):
    return {k: None if v is None else v.cuda() for k, v in case.items()}


def run(gpu, case, **options):
    got = harness.call(gpu, on_card(case), stream=torch.cuda.current_stream().cuda_stream, **options)
    torch.cuda.synchronize()
    return got


@pytest.mark.parametrize("gate", harness.GATES)
@pytest.mark.parametrize("cu", [None, RAGGED], ids=["one", "ragged"])
def test_gradients_match_the_float64_recurrence(gpu, gate, cu):
    case = harness.make_case(400, 4, gate, cu)
    assert not harness.outside_limits(run(gpu, case), harness.truth(case))


@pytest.mark.parametrize("a_log", [-20.0, 20.0])
def test_extreme_gate_rates_stay_finite_and_right(gpu, a_log):
    case = harness.make_case(130, 4, a_log=1.0)
    case["A_log"] = torch.full_like(case["A_log"], a_log)
    got, want = run(gpu, case), harness.truth(case)
    # At e^20 every gate is a step and its gradient zero to any precision; the others must hold as ever.
    names = [n for n in harness.GRADS if a_log < 0 or n not in ("dg", "dA_log", "ddt_bias")]
    assert all(torch.isfinite(x).all() for x in got.values())
    found = harness.outside_limits(got, want)
    assert not [n for n in names if n in found], found


def test_runs_head_groups_and_graph_replay_give_the_same_bits(gpu):
    case = on_card(harness.make_case(300, 5, cu=[0, 130, 300]))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = {k: v.clone() for k, v in harness.call(gpu, case, stream=stream.cuda_stream).items()}
        grouped = harness.call(gpu, case, num_sms=8, stream=stream.cuda_stream)
        stream.synchronize()
        assert all(torch.equal(first[n], grouped[n]) for n in first)
        keep = harness.allocate(gpu, case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            harness.call(gpu, case, stream=torch.cuda.current_stream().cuda_stream, keep=keep)
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(first[n], keep[n]) for n in first)


def test_packed_documents_equal_each_document_alone_bitwise(gpu):
    cu = [0, 130, 147, 147, 400]
    packed = harness.make_case(400, 2, cu=cu)
    got = run(gpu, packed)
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        alone = {k: v[a:b].contiguous() if k in ("q", "k", "v", "g", "do", "beta") else v for k, v in packed.items()}
        alone.update(cu=None, initial_state=packed["initial_state"][n : n + 1].contiguous(), dfinal=packed["dfinal"][n : n + 1].contiguous())
        one = run(gpu, alone) if b > a else dict(dinitial_state=packed["dfinal"][n : n + 1].cuda())
        for name in one.keys() & {"dq", "dk", "dv", "dg", "dbeta"}:
            assert torch.equal(got[name][a:b], one[name]), name
        assert torch.equal(got["dinitial_state"][n], one["dinitial_state"][0])
