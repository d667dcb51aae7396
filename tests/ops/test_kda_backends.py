"""Which KDA backend serves is decided in words, and the CUDA op has the shape rules that tracing needs.

Why it matters: a layer that silently falls to the reference trains a hundred times slower; a fake that disagrees with the
kernel breaks compile and checkpointing far from the cause. Not covered: the kernels' numbers (test_kda_cuda.py).
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megamoe.ops.kda_chunk import cuda, fla
from megamoe.ops.registry import choose, status

needs_extension = pytest.mark.skipif(importlib.util.find_spec("megamoe._C") is None, reason="megamoe._C is not built: python setup.py build_ext --inplace (nvcc)")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="states what a machine without a GPU answers")


@pytest.mark.parametrize(
    "facts, words",
    [
        (dict(K=64), "head width 128, not K=64"),
        (dict(V=256), "head width 128, not K=128, V=256"),
        (dict(gate="softplus"), "bounded gate"),
        (dict(dtype=torch.float32), "bf16"),
        (dict(device="cpu"), "no CUDA device"),
    ],
)
def test_cuda_says_why_not(facts, words):
    assert words in cuda.why_not(**facts)


@needs_no_gpu
def test_without_a_gpu_the_reference_serves_and_both_reasons_are_kept():
    backend = choose("kda_chunk", K=128, V=128, gate="bounded")
    assert backend.__module__.endswith("kda_chunk.reference")
    choice = next(c for c in status() if c.op == "kda_chunk")
    assert [name for name, _ in choice.reasons] == ["cuda", "fla"] and all(reason for _, reason in choice.reasons)


@needs_no_gpu
def test_asking_for_cuda_by_name_raises_with_the_reason():
    with pytest.raises(ValueError, match="no CUDA device"):
        choose("kda_chunk", prefer="cuda", K=128, V=128, gate="bounded")


def test_fla_refuses_float64():
    assert fla.why_not(dtype=torch.float64) is not None


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


@needs_extension
@pytest.mark.parametrize("beta_dtype", [torch.bfloat16, torch.float32])
def test_fakes_give_shapes_and_dtypes_of_outputs_and_gradients(beta_dtype):
    kda = cuda.load()
    T, H, N = 100, 3, 2
    inputs = [meta(T, H, 128) for _ in range(4)] + [meta(T, H, dtype=beta_dtype), meta(H, dtype=torch.float32), meta(H, 128, dtype=torch.float32), meta(N, H, 128, 128, dtype=torch.float32)]
    cu = torch.empty(N + 1, dtype=torch.int32, device="meta")
    o, final = kda(*inputs[:5], A_log_H=inputs[5], dt_bias_HK=inputs[6], initial_state_NHKV=inputs[7], cu_seqlens=cu, output_final_state=True)
    assert o.shape == (T, H, 128) and o.dtype == torch.bfloat16
    assert final.shape == (N, H, 128, 128) and final.dtype == torch.float32
    grads = torch.autograd.grad(o.sum() + final.sum(), inputs)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in inputs]


@needs_extension
def test_backward_keeps_only_the_raw_inputs():
    kda = cuda.load()
    T, H = 64, 2
    inputs = [meta(T, H, 128) for _ in range(4)] + [meta(T, H), meta(H, dtype=torch.float32), meta(H, 128, dtype=torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kda(*inputs[:5], A_log_H=inputs[5], dt_bias_HK=inputs[6])
    per_token_head = sum(x.numel() * x.element_size() for x in kept if x.shape[:1] == (T,)) / (T * H)
    assert per_token_head == 4 * 128 * 2 + 2


@needs_extension
@pytest.mark.parametrize(
    "change, words",
    [
        (dict(K=64), "K=64"),
        (dict(gate="softplus"), "'softplus' is not served"),
        (dict(dtype=torch.float32), "takes bfloat16"),
        (dict(beta=torch.float16), "beta is torch.float16"),
    ],
)
def test_cuda_call_names_what_it_cannot_take(change, words):
    kda = cuda.load()
    K, dtype = change.get("K", 128), change.get("dtype", torch.bfloat16)
    rows = [meta(8, 2, K, dtype=dtype) for _ in range(4)]
    with pytest.raises(ValueError) as error:
        kda(*rows, meta(8, 2, dtype=change.get("beta", torch.float32)), A_log_H=meta(2, dtype=torch.float32), gate=change.get("gate", "bounded"))
    assert words in str(error.value) and "\n" not in str(error.value)
