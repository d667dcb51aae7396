"""The chunked KDA reference is the recurrence, for every layout of documents, and it looks at nothing ahead.

Why it matters: the chunked form is what CPU runs train with and what every kernel is judged by; a wrong anchor or mask
shows up as a slightly worse model, not as a crash (FLA's first anchor leaked the future by 1e-4).
Not covered: kernels (test_kda_cuda.py), bf16 rounding (test_kda_emulation.py), convolution, output gate.
"""

from __future__ import annotations

import pytest
import torch

from megamoe.ops.kda_chunk import kda_chunk as public_kda_chunk
from megamoe.ops.kda_chunk.reference import kda_chunk, kda_recurrent

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
MIXTURES = [[n] for n in (0, 1, 15, 16, 17, 63, 64, 65, 200)] + [[64, 0, 1, 17, 0], [0, 0], [65, 200, 16], [0, 15, 63, 130, 0, 64]]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def make(lengths, *, H=2, K=8, V=12, dtype=torch.float64, g=None):
    T, N = sum(lengths), len(lengths)
    inputs = [torch.randn(T, H, K), torch.randn(T, H, K), torch.randn(T, H, V), torch.randn(T, H, K), torch.randn(T, H),
              0.5 * torch.randn(H), 0.5 * torch.randn(H, K), torch.randn(N, H, K, V)]  # fmt: skip
    inputs = [x.to(dtype) for x in inputs]
    if g is not None:
        inputs[3], inputs[5], inputs[6] = torch.full_like(inputs[3], g), torch.zeros_like(inputs[5]), torch.zeros_like(inputs[6])
    cu = torch.tensor([0] + lengths).cumsum(0).to(torch.int32)
    return [x.requires_grad_() for x in inputs], cu


def call(op, inputs, cu, *, gate="bounded", **kw):
    q, k, v, g, beta, A_log, dt_bias, h0 = inputs
    return op(q, k, v, g, beta, A_log_H=A_log, dt_bias_HK=dt_bias, gate=gate, cu_seqlens=cu, initial_state_NHKV=h0, output_final_state=True, **kw)


def outputs_and_gradients(op, inputs, cu, **kw):
    o, final = call(op, inputs, cu, **kw)
    generator = torch.Generator().manual_seed(3)  # drawn in float64: the same weights whatever the dtype under test
    weight_o, weight_final = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, final))
    loss = (o * weight_o).sum() + (final * weight_final).sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, inputs, materialize_grads=True)]


def assert_all_close(actual, expected, limit):
    for name, a, b in zip(("o", "final_state", *NAMES), actual, expected):
        assert torch.isfinite(a).all(), name
        error = (a - b).norm() / b.norm().clamp_min(1e-30)
        assert error <= limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("lengths", MIXTURES, ids=str)
def test_chunked_matches_recurrence_with_every_gradient(lengths, gate):
    inputs, cu = make(lengths)
    assert_all_close(outputs_and_gradients(kda_chunk, inputs, cu, gate=gate), outputs_and_gradients(kda_recurrent, inputs, cu, gate=gate), 1e-10)


@pytest.mark.parametrize("logit", [-30.0, 0.0, 30.0], ids=["g=0", "g=-2.5", "g=-5"])
def test_chunked_matches_recurrence_at_the_ends_of_the_gate(logit):
    inputs, cu = make([130, 17], g=logit)
    assert_all_close(outputs_and_gradients(kda_chunk, inputs, cu), outputs_and_gradients(kda_recurrent, inputs, cu), 1e-10)


def test_fp32_stays_finite_and_close_at_the_steepest_gate():
    inputs, cu = make([200], K=64, V=64, g=30.0)
    single = [x.detach().float().requires_grad_() for x in inputs]
    actual = outputs_and_gradients(kda_chunk, single, cu)
    expected = outputs_and_gradients(kda_recurrent, inputs, cu)
    # The gate saturates at logit 30: its gradients are below 1e-12 of the others and pure rounding in fp32.
    keep = [i for i, name in enumerate(("o", "final_state", *NAMES)) if name not in ("g", "A_log", "dt_bias")]
    for i in keep:
        assert (actual[i].double() - expected[i]).norm() <= 1e-5 * expected[i].norm()
    assert all(torch.isfinite(x).all() for x in actual)


def test_unbounded_gate_far_below_minus_five_has_finite_gradients():
    # exp before the mask gives inf forward and NaN only in the gradient: the failure that hides in inference tests.
    inputs, cu = make([64, 40], g=40.0)
    single = [x.detach().float().requires_grad_() for x in inputs]
    actual = outputs_and_gradients(kda_chunk, single, cu, gate="softplus")
    expected = outputs_and_gradients(kda_recurrent, inputs, cu, gate="softplus")
    for name, a, b in zip(("o", "final_state", *NAMES), actual, expected):
        assert torch.isfinite(a).all(), name
        assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max().clamp_min(1e-6), name


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_change_nothing_before_them(dtype, gate):
    inputs, cu = make([200], dtype=dtype)
    for P in (1, 7, 16, 40, 63, 64, 100, 150):
        results = []
        for change in (False, True):
            altered = [x.detach().clone() for x in inputs]
            if change:
                for x in altered[:5]:
                    x[P:] = 3 * torch.randn_like(x[P:])
            altered = [x.requires_grad_() for x in altered]
            o, _ = call(kda_chunk, altered, cu, gate=gate)
            grads = torch.autograd.grad((o[:P] * torch.linspace(-1, 1, P, dtype=dtype)[:, None, None]).sum(), altered)
            results.append([o[:P], *(x[:P] for x in grads[:5]), *grads[5:]])
            assert all((x[P:] == 0).all() for x in grads[:5])
        assert all(torch.equal(a, b) for a, b in zip(*results)), P


def test_appending_tokens_changes_nothing_before_them():
    inputs, _ = make([200], dtype=torch.float32)
    whole, _ = call(kda_chunk, inputs, None)
    for P in (1, 15, 17, 64, 77, 129):
        part, _ = call(kda_chunk, [x[:P] for x in inputs[:5]] + inputs[5:], None)
        assert torch.equal(part, whole[:P]), P


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_packed_documents_equal_each_alone_bit_for_bit(gate):
    lengths = [65, 0, 200, 1, 64, 17]
    inputs, cu = make(lengths, K=32, V=32, dtype=torch.float32)
    together = outputs_and_gradients_per_document(inputs, cu, gate)
    for n, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        alone = [x[start:stop].detach().requires_grad_() for x in inputs[:5]] + [x.detach().requires_grad_() for x in inputs[5:7]] + [inputs[7][n : n + 1].detach().requires_grad_()]
        o, final, *grads, d_h0 = outputs_and_gradients_per_document(alone, None, gate)
        assert torch.equal(o, together[0][start:stop]) and torch.equal(final[0], together[1][n]) and torch.equal(d_h0[0], together[7][n]), n
        for a, b in zip(grads, together[2:7]):
            assert torch.equal(a, b[start:stop]), n


def outputs_and_gradients_per_document(inputs, cu, gate):
    o, final = call(kda_chunk, inputs, cu, gate=gate)
    grads = torch.autograd.grad(o.square().sum() + final.square().sum(), inputs[:5] + inputs[7:])
    return [o, final, *grads]


def test_splitting_a_document_and_passing_the_state_is_the_whole():
    inputs, _ = make([160])
    whole, whole_final = call(kda_chunk, inputs, None)
    first, state = call(kda_chunk, [x[:75] for x in inputs[:5]] + inputs[5:], None)
    second, final = call(kda_chunk, [x[75:] for x in inputs[:5]] + inputs[5:7] + [state], None)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(final, whole_final, rtol=0, atol=1e-12)


def test_defaults_are_one_document_no_bias_no_state_and_scale_by_width():
    inputs, cu = make([50])
    q, k, v, g, beta, A_log, dt_bias, h0 = inputs
    o, final = public_kda_chunk(q, k, v, g, beta, A_log_H=A_log)
    assert final is None
    expected, _ = kda_recurrent(q, k, v, g, beta, A_log_H=A_log, dt_bias_HK=torch.zeros_like(dt_bias), scale=8**-0.5, cu_seqlens=cu, initial_state_NHKV=torch.zeros_like(h0))
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)


def test_bf16_inputs_give_bf16_outputs_and_fp32_state():
    inputs, cu = make([70], dtype=torch.bfloat16)
    o, final = call(kda_chunk, inputs, cu)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    expected, _ = call(kda_recurrent, [x.detach().double() for x in inputs], cu)
    assert (o.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(k=torch.zeros(5, 2, 9)), "k has shape"),
        (dict(beta=torch.zeros(5, 3)), "beta has shape"),
        (dict(gate="sigmoid"), "gate='sigmoid'"),
        (dict(lower_bound=-6.0), "lower_bound=-6.0"),
        (dict(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens is torch.int64"),
        (dict(cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)), "rise from 0 to T=5"),
        (dict(initial_state_NHKV=torch.zeros(2, 2, 8, 8)), "initial_state has shape"),
        (dict(v=torch.zeros(5, 2, 8, dtype=torch.float64)), "float64"),
        (dict(q=torch.zeros(1, 5, 2, 8)), "pack the batch into one stream"),
    ],
)
def test_wrong_inputs_are_named_in_one_line(change, words):
    call_args = dict(q=torch.zeros(5, 2, 8), k=torch.zeros(5, 2, 8), v=torch.zeros(5, 2, 8), g=torch.zeros(5, 2, 8), beta=torch.zeros(5, 2)) | {n: x for n, x in change.items() if n in ("q", "k", "v", "g", "beta")}
    options = {n: x for n, x in change.items() if n not in call_args}
    with pytest.raises(ValueError) as error:
        kda_chunk(*call_args.values(), A_log_H=torch.zeros(2), **options)
    assert words in str(error.value) and "\n" not in str(error.value)
