"""MXFP4 codes and scales are those of the format's definition, bit for bit, in both backends.

Why: released experts are these bytes; one wrong nibble or exponent is a wrong weight that no loss curve shows. The
definition is written out here in float64 from the value table, sharing no code with the ops. On CPU the Triton kernels run
in Triton's interpreter. Not covered: speed.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from megamoe.ops import mxfp4
from megamoe.ops.mxfp4 import reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EDGE_SCALES = [0, 1, 2, 126, 127, 128, 251, 252, 253, 254, 255]


def backends():
    found = [pytest.param(reference, id="reference")]
    if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
        from megamoe.ops.mxfp4 import triton

        found.append(pytest.param(triton, id="triton"))
    return found


def defined_values(codes, scale: int) -> torch.Tensor:
    """float64, from the definition."""
    return torch.tensor([(-1 if c & 8 else 1) * TABLE[c & 7] * 2.0 ** (scale - 127) if scale < 255 else math.nan for c in codes], dtype=torch.float64)


def defined_encoding(group: list[float]) -> tuple[list[int], int]:
    """Smallest exponent at which nothing exceeds 6, then the nearest code by search, ties to the even code."""
    if not all(map(math.isfinite, group)):
        return [0] * 32, 255
    largest = max(map(abs, group))
    e = 0 if largest == 0 else next(e for e in range(-127, 128) if largest <= 6 * 2.0**e)
    codes = []
    for v in group:
        near = min(range(8), key=lambda c: (abs(abs(v) - TABLE[c] * 2.0**e), c % 2))
        codes.append(near | (8 if math.copysign(1, v) < 0 else 0))
    return codes, e + 127


def unpack(packed):
    return [n for byte in packed.flatten().tolist() for n in (byte & 15, byte >> 4)]


@pytest.mark.parametrize("op", backends())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_at_edge_scales_decodes_to_its_definition(op, dtype):
    codes = [*range(16), *reversed(range(16))]
    packed = torch.tensor([codes[2 * j] | codes[2 * j + 1] << 4 for j in range(16)], dtype=torch.uint8)
    # The interpreter's own cast to bf16 flushes subnormals; the card's does not, and the fp32 case covers them here.
    flushes = op is not reference and dtype is torch.bfloat16 and not ON_GPU
    for scale in EDGE_SCALES[2:] if flushes else EDGE_SCALES:
        got = op.decode(packed[None].to(DEVICE), torch.tensor([[scale]], dtype=torch.uint8, device=DEVICE), dtype)[0].cpu()
        # What exceeds the dtype is infinite; all else is exact, so the cast of the float64 value is the value.
        expected = defined_values(codes, scale).to(dtype)
        assert torch.equal(got.nan_to_num(7e30), expected.nan_to_num(7e30)), (scale, got, expected)
        assert scale == 255 or torch.equal(torch.signbit(got), torch.signbit(expected)), scale
        if scale <= 252:
            assert torch.equal(got.double(), defined_values(codes, scale)), f"inexact at {scale}"


def hard_groups() -> torch.Tensor:
    """(G, 32) fp32: ties, just beside ties, saturation borders, subnormals, zeros of both signs, huge and mixed sizes."""
    g = torch.Generator().manual_seed(5)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.cat([torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))])
    row = torch.zeros(32)
    row[:7], row[7:21], row[21:28], row[31] = ties, beside, -ties, 6.0
    rows = [row * 2.0**e for e in (-120, -1, 0, 1, 120)]
    rows += [torch.where(torch.arange(32) == 9, v, 0.1 * v) for v in (6.0, 6.0000005, 7.9999995, 8.0, 4.0, 3.0, 3.4e38, 1.5 * 2.0**127)]
    rows += [torch.full((32,), v) for v in (0.0, -0.0, 1e-40, 2.0**-149, -(2.0**-127), 0.25 * 2.0**-127, 5.9 * 2.0**-127)]
    rows += list(torch.randn(40, 32, generator=g) * torch.exp2(torch.randint(-100, 100, (40, 1), generator=g).float()))
    return torch.stack(rows)


@pytest.mark.parametrize("op", backends())
def test_encoding_is_the_nearest_code_at_the_smallest_scale(op):
    x = hard_groups()
    packed, scale = (t.cpu() for t in op.encode(x.to(DEVICE)))
    for i, group in enumerate(x.tolist()):
        codes, s = defined_encoding(group)
        assert scale[i].item() == s, (i, group)
        assert unpack(packed[i]) == codes, (i, group)


@pytest.mark.parametrize("op", backends())
def test_every_code_at_every_scale_encodes_to_its_definition(op):
    """All 16 codes in one group, scales 0 … 252: what is exact in fp32. Its largest code, 7, keeps the scale what it was."""
    codes = [*range(16), *reversed(range(16))]
    x = torch.stack([defined_values(codes, scale) for scale in range(253)]).float()
    packed, scale = (t.cpu() for t in op.encode(x.to(DEVICE)))
    assert scale[:, 0].tolist() == list(range(253))
    assert all(unpack(row) == codes for row in packed)


@pytest.mark.parametrize("op", backends())
def test_a_group_with_nan_or_infinity_is_nan_and_its_neighbours_are_not(op):
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40], x[2, 0] = math.nan, math.inf, -math.inf
    packed, scale = op.encode(x.to(DEVICE))
    assert scale.cpu().tolist() == [[255, 125], [125, 255], [255, 125]]
    back = op.decode(packed, scale, torch.float32).cpu().unflatten(-1, (2, 32))
    assert torch.equal(back.isnan().all(-1), torch.tensor([[True, False], [False, True], [True, False]]))
    assert torch.equal(back[0, 1], torch.ones(32))


@pytest.mark.parametrize("op", backends())
def test_values_survive_a_round_trip_and_bytes_need_not(op):
    """What the format can say is said exactly; scales may shrink, which is why unchanged experts are carried as bytes."""
    g = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (70, 32), generator=g, dtype=torch.uint8).to(DEVICE)
    scale = torch.randint(100, 150, (70, 2), generator=g, dtype=torch.uint8).to(DEVICE)
    packed[0] = 0x21  # 0.5, 1, 0.5, 1, … : the same values at a scale four times smaller
    x = op.decode(packed, scale, torch.bfloat16)
    again, smaller = op.encode(x)
    assert torch.equal(op.decode(again, smaller, torch.bfloat16), x)
    assert (smaller[0].int() < scale[0].int()).all()
    for shape in [(0, 64), (2, 3, 32)]:
        p, s = op.encode(torch.randn(shape, device=DEVICE))
        assert p.shape == (*shape[:-1], shape[-1] // 2) and s.shape == (*shape[:-1], shape[-1] // 32)
        assert op.decode(p, s).shape == shape


@pytest.mark.parametrize("form", mxfp4.FORMS)
def test_fake_quantisation_passes_gradients_unchanged(form):
    x = torch.randn(5, 64, requires_grad=True)
    y = mxfp4.fake_quantize(x, form)
    assert not torch.equal(y, x) and torch.equal(mxfp4.round_to(y, form), y), "a second rounding must change nothing"
    dout = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(y, x, dout)[0], dout)
    again = mxfp4.fake_quantize(x, form, rounded=y.detach())
    assert torch.equal(again, y) and again.data_ptr() == y.data_ptr(), "held values are used, not copied"
    assert torch.equal(torch.autograd.grad(again, x, dout)[0], dout)


def test_weight_rounding_is_encoding_and_decoding():
    x = hard_groups()
    assert torch.equal(mxfp4.round_to(x, "mxfp4"), mxfp4.decode(*mxfp4.encode(x), torch.float32))
    wide = x.double() * (1 + 1e-12)
    assert torch.equal(mxfp4.round_to(wide, "mxfp4"), mxfp4.round_to(wide.float(), "mxfp4").double())


@pytest.mark.parametrize("form", mxfp4.FORMS)
@pytest.mark.parametrize("op", [p for p in backends() if p.id == "triton"])
def test_the_one_pass_rounding_is_the_two_pass_one_bit_for_bit(op, form):
    x = torch.cat([hard_groups(), torch.randn(90, 32), torch.tensor([[math.nan, *[1.0] * 31], [-math.inf, *[1.0] * 31]])])
    x[60, :8] = torch.tensor([448.0, 449.0, -511.9, 464.0, 2.0**-7, 1.5 * 2.0**-7, 2.0**-9, 2.5 * 2.0**-9])
    for dtype in (torch.float32, torch.bfloat16):
        v = x.to(dtype)
        if dtype is torch.bfloat16 and not ON_GPU:
            v = v[v.abs().amax(-1) > 1e-30]  # the interpreter's cast to bf16 flushes subnormals
        got, want = op.round_to(v.to(DEVICE), form).cpu(), reference.round_to(v, form)
        assert torch.equal(got.isnan(), want.isnan())
        ints = torch.int32 if dtype is torch.float32 else torch.int16
        assert torch.equal(got.nan_to_num(7e30).view(ints), want.nan_to_num(7e30).view(ints)), (form, dtype)


def test_mxfp8_rounds_saturates_and_marks_nan_as_defined():
    x = torch.zeros(4, 32)
    x[0, :6] = torch.tensor([1.0, 1.0625, 1.1875, -1.3, 2.0**-9, 2.0**-20])  # one exponent up: 0.125 steps at 1, ties to even
    x[1, :3] = torch.tensor([511.0, -500.0, 449.0])  # scale 1: past 448 saturates
    x[2, 3] = math.inf
    x[3] = 1e-45
    y = mxfp4.round_to(x, "mxfp8")
    assert y[0, :6].tolist() == [1.0, 1.0, 1.25, -1.25, 2.0**-9, 0.0]
    assert y[1, :3].tolist() == [448.0, -448.0, 448.0]
    assert y[2].isnan().all() and y[3].isfinite().all()


def test_bad_shapes_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.encode(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="float64"):
        mxfp4.encode(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="form='fp4'"):
        mxfp4.round_to(torch.zeros(2, 32), "fp4")
    with pytest.raises(ValueError, match="do not fit"):
        mxfp4.decode(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.gpu
def test_backends_agree_bitwise_on_a_released_expert_size():
    from megamoe.ops.mxfp4 import triton

    x = torch.randn(3072, 3584, device="cuda", dtype=torch.bfloat16)
    for a, b in zip(triton.encode(x), reference.encode(x)):
        assert torch.equal(a, b)
    packed, scale = triton.encode(x)
    assert torch.equal(triton.decode(packed, scale), reference.decode(packed, scale))
    for form in mxfp4.FORMS:
        assert torch.equal(triton.round_to(x, form), reference.round_to(x, form))
