"""The CUDA forward's own source, run on the CPU, equals float64 and keeps its exact properties.

Why it matters: CI has no GPU, and an index, swizzle, descriptor or barrier phase that is wrong in one corner (a stage used a
second time, an empty document, a segment's map) shows there first. One fiber per CUDA thread, shared memory that starts as
NaN, copies that land only when waited for: csrc/kda_chunk/sm90_kda_chunk_fwd_simt.cuh.
Not covered: speed, the memory model and proxies, the hardware's approximate exp2 (test_kda_cuda.py, on a card).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megamoe.ops.kda_chunk.reference import kda_chunk as reference

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "kda_chunk" / "sm90_kda_chunk_fwd_driver.cu"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel source for the host")


class View(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("stride_t", ctypes.c_int64), ("stride_h", ctypes.c_int64)]


class Inputs(ctypes.Structure):
    _fields_ = [*((n, View) for n in "qkvg"), ("beta", ctypes.c_void_p), ("beta_stride_t", ctypes.c_int64), ("beta_stride_h", ctypes.c_int64), ("beta_is_bf16", ctypes.c_bool),
                ("a_log", ctypes.c_void_p), ("dt_bias", ctypes.c_void_p), ("initial_state", ctypes.c_void_p), ("cu_seqlens", ctypes.c_void_p), ("T", ctypes.c_int64),
                ("H", ctypes.c_int), ("N", ctypes.c_int), ("lower_bound", ctypes.c_float), ("scale", ctypes.c_float)]  # fmt: skip


class Forward(ctypes.Structure):
    _fields_ = [("inputs", Inputs), ("o", ctypes.c_void_p), ("final_state", ctypes.c_void_p), ("workspace", ctypes.c_void_p), ("num_sms", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    out = tmp_path_factory.mktemp("kda_fwd") / "kda_fwd_simt.so"
    subprocess.run(["g++", "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-DMEGAMOE_SIMT_EMULATION", "-DMEGAMOE_KDA_SEGMENT_ROWS=128", "-x", "c++", str(SOURCE), "-o", str(out)], check=True)
    library = ctypes.CDLL(str(out))
    library.kda_fwd_workspace_bytes.restype = library.kda_fwd_struct_bytes.restype = ctypes.c_int64
    library.kda_fwd_workspace_bytes.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    assert library.kda_fwd_struct_bytes() == ctypes.sizeof(Forward)
    return library


def make(lengths, H, offset=0.0, beta_dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    T, N = sum(lengths), len(lengths)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = [draw(T, H, 128), draw(T, H, 128), draw(T, H, 128), draw(T, H, 128) + offset]
    options = dict(A_log_H=0.3 * draw(H), dt_bias_HK=0.3 * draw(H, 128), initial_state_NHKV=0.1 * draw(N, H, 128, 128), cu_seqlens=torch.tensor([0] + lengths).cumsum(0).to(torch.int32))
    return [*(x.bfloat16() for x in rows), draw(T, H).to(beta_dtype)], options


def run(library, inputs, options, num_sms=0):
    """num_sms decides how few heads are cut into segments: 0 never."""
    q, k, v, g, beta = inputs
    T, H, _ = q.shape
    cu, h0, N = options["cu_seqlens"], options["initial_state_NHKV"], options["cu_seqlens"].numel() - 1
    o = torch.full((T, H, 128), float("nan"), dtype=torch.bfloat16)
    final = torch.full((N, H, 128, 128), float("nan"))
    workspace = torch.full((library.kda_fwd_workspace_bytes(T, H, N, num_sms) + 256,), 255, dtype=torch.uint8)
    args = Forward()
    for name, x in zip("qkvg", (q, k, v, g)):
        setattr(args.inputs, name, View(x.data_ptr(), x.stride(0), x.stride(1)))
    args.inputs.beta, args.inputs.beta_stride_t, args.inputs.beta_stride_h, args.inputs.beta_is_bf16 = beta.data_ptr(), *beta.stride(), beta.dtype == torch.bfloat16
    args.inputs.a_log, args.inputs.dt_bias = options["A_log_H"].data_ptr(), options["dt_bias_HK"].data_ptr()
    args.inputs.initial_state, args.inputs.cu_seqlens = h0.data_ptr(), cu.data_ptr()
    args.inputs.T, args.inputs.H, args.inputs.N, args.inputs.lower_bound, args.inputs.scale = T, H, N, -5.0, 128**-0.5
    args.o, args.final_state, args.workspace, args.num_sms = o.data_ptr(), final.data_ptr(), (workspace.data_ptr() + 255) // 256 * 256, num_sms
    assert library.kda_fwd(ctypes.byref(args), None) == 0
    return o, final


def assert_close(actual, inputs, options):
    double = {n: x.double() if x.is_floating_point() else x for n, x in options.items()}
    for a, b in zip(actual, reference(*(x.double() for x in inputs), **double, output_final_state=True)):
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() <= 5e-3 * b.norm() and (a.double() - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("lengths, H", [([0, 1, 15, 16, 17, 65, 0], 2), ([420], 1)], ids=["packed", "stages used again"])
def test_source_matches_float64(library, lengths, H):
    inputs, options = make(lengths, H)
    assert_close(run(library, inputs, options), inputs, options)


@pytest.mark.parametrize("offset", [9.0, -6.0], ids=["saturated", "slow"])
def test_source_matches_float64_at_the_ends_of_the_gate(library, offset):
    inputs, options = make([130, 40], 1, offset, beta_dtype=torch.bfloat16)
    assert_close(run(library, inputs, options), inputs, options)


def alone(options, n, length):
    return options | dict(initial_state_NHKV=options["initial_state_NHKV"][n : n + 1], cu_seqlens=torch.tensor([0, length], dtype=torch.int32))


def test_segments_match_float64_and_change_no_bit_when_packed_or_appended_to(library):
    """Few heads (num_sms = 8 here): documents are cut every 128 tokens from their own start. Cut relative to the stream, 13 % and 40 %
    of o's bits differed between these documents packed and alone. Lengths: cut, empty, one token past a cut, ending at a cut, uncut."""
    lengths = [300, 0, 129, 256, 60]
    inputs, options = make(lengths, 2, -6.0)
    o, final = run(library, inputs, options, num_sms=8)
    assert_close((o, final), inputs, options)
    assert not torch.equal(o, run(library, inputs, options)[0])  # or nothing was cut
    start = 0
    for n, length in enumerate(lengths):
        rows = [x[start : start + length] for x in inputs]
        if length:
            o_alone, final_alone = run(library, rows, alone(options, n, length), num_sms=8)
            assert torch.equal(o_alone, o[start : start + length]) and torch.equal(final_alone[0], final[n]), n
        start += length
    o_before, _ = run(library, [x[:200] for x in inputs], alone(options, 0, 200), num_sms=8)
    assert torch.equal(o_before, o[:200])  # appending 100 tokens moved no cut


def test_packed_documents_equal_each_alone_and_strided_equal_contiguous_bit_for_bit(library):
    lengths = [17, 33]
    inputs, options = make(lengths, 2)
    o, final = run(library, inputs, options)
    start = 0
    for n, length in enumerate(lengths):
        fused = torch.cat([x[start : start + length] for x in inputs[:4]], -1)
        strided = [fused[..., i * 128 : (i + 1) * 128] for i in range(4)] + [inputs[4][start : start + length]]
        o_alone, final_alone = run(library, strided, alone(options, n, length))
        assert torch.equal(o_alone, o[start : start + length]) and torch.equal(final_alone[0], final[n])
        start += length


def test_later_tokens_change_no_bit_before_them(library):
    inputs, options = make([70], 1)
    before, _ = run(library, inputs, options)
    for P in (5, 16, 40):
        altered = [torch.cat([x[:P], (3 * torch.randn_like(x[P:].float())).to(x.dtype)]) for x in inputs]
        after, _ = run(library, altered, options)
        assert torch.equal(before[:P], after[:P]), P
