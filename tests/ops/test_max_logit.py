"""The largest logit of every head is found exactly. Why it matters: QK-clip scales weights by it; a key of another document or
of the future would clip heads that are sound, a missed one would let logits grow.

On a CPU the kernel runs in Triton's interpreter with small tiles. Scores are formed here once more, in float64, in a loop over
documents. Not covered: speed, and compute capabilities other than the card's.
"""

from __future__ import annotations

import os

import pytest
import torch

from megamoe.ops.mla_attention import max_logit as contract
from megamoe.ops.mla_attention import max_logit_reference as reference
from megamoe.testing.models import cu_seqlens

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # of Triton's interpreter


def backends():
    found = [pytest.param(lambda *a, **k: reference.max_logit(*a, **k, block_scores=100), id="reference")]
    if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
        from megamoe.ops.mla_attention import max_logit_triton

        found.append(pytest.param(lambda *a, **k: max_logit_triton.max_logit(*a, **k, rows=16, cols=16), id="triton"))
    return found


def wanted(q, k, lengths, key_lengths, scale):
    top = torch.full((q.shape[1],), -torch.inf, dtype=torch.float64, device=q.device)
    for q_, k_ in zip(q.double().split(lengths), k.double().split(key_lengths)):
        if len(q_):
            s = torch.einsum("thq,shq->hts", q_, k_) * scale
            s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu(1 + len(k_) - len(q_)), -torch.inf)
            top = torch.maximum(top, s.amax((1, 2)))
    return top


def check(op, lengths, more, H, Q, dtype, transposed=False):
    keys = [n + (more if i % 2 == 0 else 0) for i, n in enumerate(lengths)]
    q, k = (torch.randn(sum(n), H, Q, device=DEVICE).to(dtype) for n in (lengths, keys))
    if transposed:  # heads outside tokens, width last but one
        q, k = q.permute(1, 2, 0).contiguous().permute(2, 0, 1), k.transpose(0, 1).contiguous().transpose(0, 1)
    found = op(q, k, cu_seqlens=cu_seqlens(*lengths).to(DEVICE), cu_seqlens_k=cu_seqlens(*keys).to(DEVICE) if more else None, scale=0.3)
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.double(), wanted(q, k, lengths, keys, 0.3), rtol=2e-6, atol=1e-6)


LENGTHS = {
    "one document": [53], "a tile exactly": [16], "ragged": [5, 0, 1, 40, 0, 0, 17, 1, 1, 9, 0], "single tokens": [1] * 21, "empty ends": [0, 0, 30, 0],
}  # fmt: skip


@pytest.mark.parametrize("op", backends())
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("more", [0, 19], ids=["", "keys reach back"])
def test_largest_logit_is_that_of_all_scores(op, name, more):
    check(op, LENGTHS[name], more, 2, 24, torch.float32)


@pytest.mark.parametrize("op", backends())
@pytest.mark.parametrize("Q", [8, 16, 40, 48, 192])
def test_head_widths_that_no_power_of_two_fits(op, Q):
    # The interpreter does not multiply bf16.
    check(op, [20, 3], 0, 3, Q, torch.bfloat16 if ON_GPU else torch.float32, transposed=Q == 40)


@pytest.mark.parametrize("op", backends())
def test_keys_that_a_query_may_not_see_do_not_count(op):
    """Every key but those of one pair is loud; only the pair (last query of document 1, its own key) may be seen quietly."""
    q, k = torch.full((40, 1, 16), 1e-3, device=DEVICE), torch.full((40, 1, 16), 1e-3, device=DEVICE)
    q[20] = 1.0  # last of the first document: sees keys 0 … 20
    k[21:] = 100.0  # the next document
    q[21:] = 0.0
    found = op(q, k, cu_seqlens=cu_seqlens(21, 19).to(DEVICE), scale=1.0)
    torch.testing.assert_close(found.cpu(), torch.tensor([16e-3]))
    q.zero_(), k.zero_()
    q[5], k[6] = 1.0, 1.0  # one step into the future
    assert op(q, k, cu_seqlens=cu_seqlens(40).to(DEVICE), scale=1.0).item() == 0.0


@pytest.mark.parametrize("op", backends())
def test_without_a_query_there_is_no_maximum(op):
    q = torch.zeros(0, 3, 16, device=DEVICE)
    assert op(q, q, cu_seqlens=cu_seqlens(0, 0).to(DEVICE), scale=1.0).tolist() == [-torch.inf] * 3
    keys = torch.ones(4, 3, 16, device=DEVICE)
    assert op(q, keys, cu_seqlens=cu_seqlens(0, 0).to(DEVICE), cu_seqlens_k=cu_seqlens(4, 0).to(DEVICE), scale=1.0).tolist() == [-torch.inf] * 3


@pytest.mark.parametrize("op", [*backends(), pytest.param(contract.max_logit, id="chosen")])
def test_negative_logits_are_maxima_too(op):
    """Rows and keys that pad a tile have zero scores, which would win here."""
    q, k = torch.ones(53, 2, 24, device=DEVICE), -torch.ones(53, 2, 24, device=DEVICE)
    assert op(q, k, cu_seqlens=cu_seqlens(3, 50).to(DEVICE), scale=0.5).tolist() == [-12.0, -12.0]


def test_width_is_cut_into_powers_of_two():
    pytest.importorskip("triton")
    from megamoe.ops.mla_attention.max_logit_triton import cut_width

    assert cut_width(192) == (128, 64) and cut_width(128) == (128, 0) and cut_width(24) == (16, 16) and cut_width(8) == (16, 0)
    assert all(sum(cut_width(Q)) >= Q for Q in range(1, 257))


def test_shapes_that_do_not_fit_are_refused():
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="must be"):
        contract.max_logit(q, torch.zeros(5, 2, 8), cu_seqlens=cu_seqlens(4), scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths, more", [([8192], 0), ([1] * 500 + [3000, 0, 777, 1], 0), ([1500, 2000], 640)], ids=["one", "ragged", "keys reach back"])
def test_full_width_on_a_gpu(lengths, more):
    from megamoe.ops.mla_attention import max_logit_triton

    check(max_logit_triton.max_logit, lengths, more, 8, 192, torch.bfloat16)


@pytest.mark.gpu
def test_the_host_does_not_wait():
    from megamoe.ops.mla_attention.max_logit import max_logit

    q, k = (torch.randn(512, 4, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cu = cu_seqlens(300, 212).cuda()
    max_logit(q, k, cu_seqlens=cu, scale=0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = max_logit(q, k, cu_seqlens=cu, scale=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = max_logit(q, k, cu_seqlens=cu, scale=0.1)
    assert torch.equal(found, again)
