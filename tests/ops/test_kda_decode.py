"""A decode step is one token of the recurrence that trained the model, in the reference and in the kernel's own source.

Why it matters: generation that drifts from training shows up as worse text and nowhere else. The kernel source runs on the CPU,
one fiber per CUDA thread (csrc/kda_chunk/sm90_kda_chunk_fwd_simt.cuh); the last test runs it on a card.
Not covered: speed (the step is the traffic of its states).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megamoe.ops.kda_chunk.reference import kda_chunk as chunk_reference
from megamoe.ops.kda_decode import cuda, kda_decode
from megamoe.ops.kda_decode.reference import kda_decode as reference

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "kda_decode" / "smxx_kda_decode_driver.cu"


def make(B, H, S, offset=0.0, dtype=torch.bfloat16, seed=0, W=128):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = [draw(B, H, W).to(dtype) for _ in range(3)] + [(draw(B, H, W) + offset).to(dtype), draw(B, H).to(torch.float32 if dtype == torch.bfloat16 else dtype)]
    return rows, 0.3 * draw(S, H, W, W).to(torch.float64 if dtype == torch.float64 else torch.float32), dict(A_log_H=0.3 * draw(H), dt_bias_HK=0.3 * draw(H, W))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_steps_of_the_reference_are_the_chunked_form(gate):
    steps, B, H, W = 5, 3, 2, 16
    tokens = [make(B, H, B, dtype=torch.float64, seed=t, W=W)[0] for t in range(steps)]
    _, start, options = make(B, H, B, dtype=torch.float64, W=W)
    packed = [torch.stack([token[i] for token in tokens], 1).flatten(0, 1) for i in range(5)]  # document after document
    o, final = chunk_reference(*packed, **options, gate=gate, cu_seqlens=torch.arange(0, B * steps + 1, steps, dtype=torch.int32), initial_state_NHKV=start, output_final_state=True)
    state = start.clone()
    outputs = torch.stack([kda_decode(*token, state, **options, gate=gate) for token in tokens], 1).flatten(0, 1)
    torch.testing.assert_close(outputs, o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-12, atol=1e-12)


class View(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("stride_t", ctypes.c_int64), ("stride_h", ctypes.c_int64)]


class Decode(ctypes.Structure):
    _fields_ = [*((n, View) for n in "qkvg"), ("beta", ctypes.c_void_p), ("beta_stride_b", ctypes.c_int64), ("beta_stride_h", ctypes.c_int64), ("beta_is_bf16", ctypes.c_bool),
                ("a_log", ctypes.c_void_p), ("dt_bias", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("states", ctypes.c_void_p), ("o", ctypes.c_void_p),
                ("B", ctypes.c_int64), ("H", ctypes.c_int), ("lower_bound", ctypes.c_float), ("scale", ctypes.c_float)]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The kernel's source on the CPU, with the reference's signature."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to compile the kernel source for the host")
    out = tmp_path_factory.mktemp("kda_decode") / "kda_decode_simt.so"
    subprocess.run(["g++", "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-DMEGAMOE_SIMT_EMULATION", "-x", "c++", str(SOURCE), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.kda_decode_struct_bytes.restype = ctypes.c_int64
    assert library.kda_decode_struct_bytes() == ctypes.sizeof(Decode)

    def call(q, k, v, g, beta, state, *, A_log_H, dt_bias_HK=None, slots_B=None):
        B, H, _ = q.shape
        o = torch.full((B, H, 128), float("nan"), dtype=torch.bfloat16)
        args, at = Decode(), lambda x: None if x is None else x.data_ptr()  # noqa: E731
        for name, x in zip("qkvg", (q, k, v, g)):
            setattr(args, name, View(x.data_ptr(), x.stride(0), x.stride(1)))
        args.beta, args.beta_stride_b, args.beta_stride_h, args.beta_is_bf16 = beta.data_ptr(), *beta.stride(), beta.dtype == torch.bfloat16
        args.a_log, args.dt_bias, args.slots, args.states, args.o = at(A_log_H), at(dt_bias_HK), at(slots_B), at(state), at(o)
        args.B, args.H, args.lower_bound, args.scale = B, H, -5.0, 128**-0.5
        assert library.kda_decode(ctypes.byref(args), None) == 0
        return o

    return call


def compare(step, rows, state, options, device="cpu"):
    """One step of `step` against the float64 reference; returns what it computed."""
    got_state = state.clone()
    o = step(*rows, got_state, **options)
    wide = state.double()
    expected = reference(*(x.double() for x in rows), wide, **{n: x.double() if x is not None and x.is_floating_point() else x for n, x in options.items()})
    assert (o.double() - expected).norm() <= 3e-3 * expected.norm()  # o is rounded to bf16, nothing else is
    assert (got_state.double() - wide).abs().max() <= 2e-6 * wide.abs().max()
    return o, got_state


@pytest.mark.parametrize("offset", [0.0, 9.0, -6.0], ids=["uniform", "saturated", "slow"])
def test_kernel_source_matches_float64(source, offset):
    rows, state, options = make(3, 2, 3, offset)
    compare(source, rows, state, options)


def test_kernel_source_takes_slots_views_and_missing_options_and_a_sequence_never_sees_its_batch(source):
    rows, state, options = make(4, 2, 6)
    fused = torch.cat(rows[:4], -1)
    rows = [fused[..., i * 128 : (i + 1) * 128] for i in range(4)] + [rows[4].bfloat16()]
    options |= dict(dt_bias_HK=None, slots_B=torch.tensor([5, -1, 0, 3], dtype=torch.int32))
    o, after = compare(source, rows, state, options)
    assert not o[1].any()  # a place without a sequence
    assert torch.equal(after[[1, 2, 4]], state[[1, 2, 4]]) and not torch.equal(after[5], state[5])
    alone = state[3:4].clone()
    assert torch.equal(source(*(x[3:] for x in rows), alone, A_log_H=options["A_log_H"])[0], o[3]) and torch.equal(alone[0], after[3])


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(state_SHKV=torch.zeros(1, 2, 128, 128)), "2 sequences and 1 states"),
        (dict(state_SHKV=torch.zeros(2, 2, 128, 64)), "expected a contiguous"),
        (dict(state_SHKV=torch.zeros(2, 2, 128, 128, dtype=torch.bfloat16)), "drifts"),
        (dict(slots_B=torch.tensor([0, 0], dtype=torch.int32)), "must be different rows"),
        (dict(slots_B=torch.tensor([0, 1])), "expected int32"),
        (dict(lower_bound=-6.0), "kda_decode: lower_bound"),
    ],
)
def test_what_it_cannot_take_is_one_line(change, words):
    rows, state, options = make(2, 2, 2)
    with pytest.raises(ValueError, match=words):
        kda_decode(*rows, change.pop("state_SHKV", state), **options | change)


def test_cuda_refuses_training():
    assert "no backward" in cuda.why_not(training=True)


@pytest.mark.gpu
def test_on_the_card_steps_continue_a_chunked_prefill_and_a_graph_replays_them():
    from megamoe.ops.kda_chunk import cuda as chunk

    reason = cuda.why_not()
    if reason:
        pytest.skip(f"needs the cuda backend: {reason}")
    decode, prefill = cuda.load(), chunk.load()
    on_card = lambda x: None if x is None else x.cuda()  # noqa: E731
    B, H, length = 5, 12, 70
    rows, start, options = make(B * length, H, B)
    rows, options, start = [on_card(x) for x in rows], {n: on_card(x) for n, x in options.items()}, on_card(start)
    cu = torch.arange(0, B * length + 1, length, dtype=torch.int32, device="cuda")
    _, state = prefill(*rows, **options, cu_seqlens=cu, initial_state_NHKV=start, output_final_state=True)
    step = [on_card(x) for x in make(B, H, B, seed=1)[0]]
    for slots in (None, torch.tensor([4, 2, -1, 0, 1], dtype=torch.int32, device="cuda")):
        compare(decode, step, state, options | dict(slots_B=slots))
    torch.library.opcheck(torch.ops.megamoe.kda_decode.default, (*step, state.clone(), options["A_log_H"], options["dt_bias_HK"], None, -5.0, 128**-0.5), test_utils=("test_schema", "test_faketensor"))
    eager, replayed = state.clone(), state.clone()
    outputs = [decode(*step, eager, **options) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode(*step, replayed, **options)
    replayed.copy_(state)
    for expected in outputs:
        graph.replay()
        assert torch.equal(o, expected)
    assert torch.equal(replayed, eager)
