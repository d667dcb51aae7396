"""The backward of KDA without a GPU: its algebra, its roundings, and its kernel source run one fiber per thread.

Why: kernel mistakes (an index, a mask, a barrier, a slot reused too early) must be found before a card is at hand, and the
cancellation in the gate's gradient (a strong gate leaves only differences of large terms) decides which operands may be rounded.
Does not cover: speed, fences between the copy engine and ordinary stores, memory-model races. tests/ops/test_kda_bwd_gpu.py does.
"""

import shutil

import pytest
import torch

from megamoe.ops.kda_chunk.emulate_bwd import kda_chunk_bwd_emulated

import test_kda_bwd_harness as harness

PACKED = [0, 0, 1, 17, 17, 80, 145, 210]  # empty documents at the start and inside, one token, a tile and one, whole and broken chunks


def emulate(case, **options):
    c = case
    return kda_chunk_bwd_emulated(c["q"], c["k"], c["v"], c["g"], c["beta"], c["do"], A_log_H=c["A_log"], dt_bias_HK=c["dt_bias"], cu_seqlens=c["cu"],
                                  initial_state_NHKV=c["initial_state"], dfinal_state_NHKV=c["dfinal"], **options)  # fmt: skip


@pytest.mark.parametrize("cu", [None, PACKED])
def test_algebra_equals_autograd_of_the_recurrence(cu):
    case = harness.make_case(210, 2, "uniform", cu)
    for name, (rms, _) in harness.errors(emulate(case, exact=True), harness.truth(case)).items():
        assert rms < 1e-10, name


@pytest.mark.parametrize("gate", harness.GATES)
def test_rounding_stays_within_limits_in_every_gate_regime(gate):
    """dg at -5 is the hard one: built from unrounded factors its error was 1.9, not 4e-3."""
    case = harness.make_case(200, 6, gate)
    assert not harness.outside_limits(emulate(case), harness.truth(case))


@pytest.fixture(scope="module")
def simt(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to run the kernel source on the CPU")
    return harness.simt_library(tmp_path_factory.mktemp("simt"))


@pytest.mark.parametrize(
    "options",
    [
        dict(T=150, H=2, gate="uniform"),
        dict(T=210, H=1, gate="slow", cu=PACKED, beta_dtype=torch.bfloat16),
        dict(T=130, H=1, gate="saturated", states=False),
        dict(T=80, H=1, gate="alternating", a_log=20.0),
    ],
    ids=["two_heads", "packed", "saturated_no_states", "rates_e20"],
)
def test_kernel_source_matches_the_recurrence(simt, options):
    case = harness.make_case(**options)
    assert not harness.outside_limits(harness.call(simt, case, num_sms=4), harness.truth(case))


def test_kernel_source_computes_what_the_emulation_computes(simt):
    """Same roundings in the same places: an order of magnitude closer to each other than to the truth."""
    case = harness.make_case(100, 1, "uniform")
    want = emulate(case)
    want = {name: want[name].to(x.dtype) for name, x in harness.call(simt, case).items()}
    for name, (rms, _) in harness.errors(harness.call(simt, case), want).items():
        assert rms < 1e-3, name


def test_few_heads_cut_documents_and_packing_changes_no_bit(simt):
    """Cuts every 128 rows from a document's own start: 257 rows are three segments. The slow gate makes the maps matter."""
    cu = [0, 43, 43, 300]
    packed = harness.make_case(300, 2, "slow", cu)
    got = harness.call(simt, packed, num_sms=22)
    assert not harness.outside_limits(got, harness.truth(packed))
    whole = harness.call(simt, packed, num_sms=21)
    assert not torch.equal(got["dq"], whole["dq"]) and not torch.equal(got["dk"], whole["dk"])  # or nothing was cut, in either direction
    for n in (0, 2):
        one = harness.call(simt, alone(packed, cu[n], cu[n + 1], n), num_sms=22)
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(got[name][cu[n] : cu[n + 1]], one[name]), name
        assert torch.equal(got["dinitial_state"][n], one["dinitial_state"][0])
    assert torch.equal(got["dinitial_state"][1], packed["dfinal"][1])


def alone(case, a, b, n):
    one = {k: v[a:b].contiguous() if k in ("q", "k", "v", "g", "do", "beta") else v for k, v in case.items()}
    return one | dict(cu=None, initial_state=case["initial_state"][n : n + 1].contiguous(), dfinal=case["dfinal"][n : n + 1].contiguous())


def test_packed_documents_equal_each_document_alone_bitwise(simt):
    cu = [0, 70, 70, 87]
    packed = harness.make_case(87, 1, cu=cu)
    got = harness.call(simt, packed)
    for n, (a, b) in enumerate(zip(cu, cu[1:])):
        if a == b:  # an empty document hands the state's gradient through
            assert torch.equal(got["dinitial_state"][n], packed["dfinal"][n])
            continue
        one = harness.call(simt, alone(packed, a, b, n))
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(got[name][a:b], one[name]), name
        assert torch.equal(got["dinitial_state"][n], one["dinitial_state"][0])


def test_peak_of_a_training_call_fits_the_budget(simt):
    """8192 x 96: inputs, outputs, gradients and the workspace, as kda_chunk_bwd allocates them, are under 2.5 GiB together (the
    forward holds less), and the workspace is that of one pass: twice the heads do not double it."""
    rows, logits = 8192 * 96 * 128 * 2, 8192 * 96 * 4
    workspace = {heads: harness.workspace_bytes(simt, 8192, heads, 1, 132) for heads in (96, 192)}
    held = 4 * rows + logits  # q, k, v, g, beta
    gradients = held + 2 * rows  # and o, d_o
    assert held + gradients + workspace[96] <= 2.5 * 2**30, (held + gradients + workspace[96]) / 2**30
    assert workspace[192] <= 1.1 * workspace[96], workspace


def test_gradients_do_not_depend_on_how_heads_are_grouped(simt):
    case = harness.make_case(66, 3)
    one_pass, three_passes = harness.call(simt, case, num_sms=132), harness.call(simt, case, num_sms=4)
    for name in harness.GRADS:
        assert torch.equal(one_pass[name], three_passes[name]), name


@pytest.mark.parametrize("T, cut, num_sms", [(100, 37, 132), (300, 200, 11)], ids=["one_walk", "segments"])
def test_later_tokens_do_not_reach_gradients_of_an_earlier_loss(simt, T, cut, num_sms):
    """Loss on tokens before `cut` only: changing every input from there on changes no bit before, and gives exact zeros after."""
    case = harness.make_case(T, 1, "slow", states=False)
    case["do"][cut:] = 0
    first = harness.call(simt, case, num_sms=num_sms)
    other = harness.make_case(T, 1, seed=1, states=False)
    for name in ("q", "k", "v", "g", "beta"):
        case[name] = torch.cat([case[name][:cut], other[name][cut:]])
    second = harness.call(simt, case, num_sms=num_sms)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(first[name][:cut], second[name][:cut]), name
        assert not second[name][cut:].any(), name


def test_inputs_are_unchanged_and_outputs_written_in_full(simt):
    case = harness.make_case(65, 1, cu=[0, 1, 65])
    before = {k: None if v is None else v.clone() for k, v in case.items()}
    got = harness.call(simt, case)  # outputs and workspace start as NaN
    assert all(torch.isfinite(x).all() for x in got.values())
    assert all(v is None or torch.equal(v, before[k]) for k, v in case.items())
