"""The KDA layer equals flash-linear-attention's plain recurrence, and a document does not know it was packed or cut.

Why it matters: the layer is two thirds of the model; row orders, the place of the bias in the gate, the norm's epsilon
and the head order of the gates are conventions that only foreign code can confirm. The recurrence used here is FLA's
`naive_recurrent_kda` (loaded from its file: it needs no GPU, while FLA's package import needs Triton); projections,
convolutions and gates are written out again in this file from the formulas.

Not covered: the op's backends and chunking (tests/ops/test_kda_chunk.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megamoe.layers.config import GateKind, KDAConfig, OutputGate
from megamoe.layers.kda import KDA, KDAState
from megamoe.layers.stream import Stream

D, H, K = 20, 3, 8


def fla_recurrence():
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("needs flash-linear-attention's sources: pip install --no-deps fla-core==0.6.0 einops")
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_recurrent_kda


def layer(gate=GateKind.bounded, output_gate=OutputGate.full, dtype=torch.float32):
    kda = KDA(D, KDAConfig(num_heads=H, head_dim=K, gate=gate, output_gate=output_gate)).to(dtype)
    with torch.no_grad():
        for p in kda.parameters():
            p.normal_(0, 0.5)
    return kda


def stream(*lengths):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Stream.build(sum(lengths), cu)


@pytest.mark.parametrize("gate", list(GateKind))
@pytest.mark.parametrize("output_gate", list(OutputGate))
def test_layer_matches_the_recurrence_of_flash_linear_attention(gate, output_gate):
    recurrence, kda, T = fla_recurrence(), layer(gate, output_gate), 70
    x = torch.randn(T, D)

    def conv(proj, weight):
        return F.silu(F.conv1d(F.pad((x @ proj.weight.T).T[None], (3, 0)), weight, groups=H * K)[0].T).view(1, T, H, K)

    q, k, v = (conv(getattr(kda, f"{n}_proj"), getattr(kda, f"{n}_conv1d").weight) for n in "qkv")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    z = (x @ kda.f_a_proj.weight.T @ kda.f_b_proj.weight.T + kda.dt_bias).view(1, T, H, K)
    rate = kda.A_log.exp()[:, None]
    g = -5 * torch.sigmoid(rate * z) if gate is GateKind.bounded else -rate * F.softplus(z)
    o, _ = recurrence(q, k, v, g, torch.sigmoid(x @ kda.b_proj.weight.T)[None])
    normed = o[0] * (o[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * kda.o_norm.weight
    gates = x @ kda.g_proj.weight.T if output_gate is OutputGate.full else x @ kda.g_a_proj.weight.T @ kda.g_b_proj.weight.T
    expected = (normed * torch.sigmoid(gates.view(T, H, K))).reshape(T, -1) @ kda.o_proj.weight.T

    got, _ = kda(x, stream(T))
    torch.testing.assert_close(got, expected, atol=2e-5 * expected.abs().max().item(), rtol=0)
    upstream = torch.randn(T, D)
    params = list(kda.parameters())
    for (name, _), a, b in zip(kda.named_parameters(), *(torch.autograd.grad(y, params, upstream) for y in (got, expected))):
        torch.testing.assert_close(a, b, atol=2e-4 * b.abs().max().item(), rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_a_packed_document_is_the_document_alone():
    kda, lengths = layer(dtype=torch.float64), (5, 0, 70, 1, 3)
    x = torch.randn(sum(lengths), D, dtype=torch.float64)
    packed, _ = kda(x, stream(*lengths))
    for document, expected in zip(x.split(lengths), packed.split(lengths)):
        if len(document):
            torch.testing.assert_close(kda(document, stream(len(document)))[0], expected, atol=1e-13, rtol=0)


def test_a_document_continues_from_its_state():
    """Cut anywhere, also inside the convolution's reach, the rest sees exactly what came before: output and state."""
    kda = layer(dtype=torch.float64)
    x = torch.randn(40, D, dtype=torch.float64)
    whole, state = kda(x, stream(40), output_state=True)
    for cut in (1, 2, 16, 39):
        first, carried = kda(x[:cut], stream(cut), output_state=True)
        second, last = kda(x[cut:], stream(40 - cut), state=carried, output_state=True)
        torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-13, rtol=0)
        for a, b in zip(last, state):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=0)
    assert isinstance(state, KDAState) and state.recurrent_NHKV.shape == (1, H, K, K)


def test_decay_and_taps_stay_in_float32_when_the_layer_is_cast():
    kda = layer().bfloat16()
    kept = {name for name, p in kda.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"}
    exact = layer()
    exact.A_log.data.fill_(1 + 2**-20)
    assert exact.bfloat16().A_log[0].item() == 1 + 2**-20, "kept, not rounded and widened again"
    assert kda(torch.randn(9, D).bfloat16(), stream(9))[0].dtype == torch.bfloat16
