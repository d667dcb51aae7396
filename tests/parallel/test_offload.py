"""Activation offload. Why it matters: a tensor that comes back changed, or another layer's, trains on without an error.

Bit for bit: the same kernels run on the same values and strides. Not covered here: streams and pinned memory (a GPU).
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from megamoe.model.config import MTPConfig
from megamoe.parallel import offload as module
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.offload import ActivationOffload
from megamoe.testing.pool import RankPool
from megamoe.testing.proof import Case, small_model, trace

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("recompute, parallel", [("none", {}), ("full", {}), ("experts", dict(pp=2, vpp=2))], ids=["one rank", "recompute", "pp2-vpp2"])
def test_training_is_bit_for_bit_the_same(pool, recompute, parallel):
    case = Case(small_model(mtp=MTPConfig(num_layers=1)), ParallelConfig(**parallel), 2 if parallel else 1, recompute=recompute)
    for kept, moved in zip(pool.run(trace, case.world, case, timeout_s=100), pool.run(trace, case.world, replace(case, offload=True), timeout_s=100)):
        assert kept["loss"] == moved["loss"] and kept["norm"] == moved["norm"]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(kept["weights"], moved["weights"], strict=True))


class Layer(nn.Module):
    """Saves its input (twice, once as a view), a product and its square root."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = x @ self.weight
        return (y * y[:, :1]).sin() * (x.t()[:8].t() + 3).square()


def _chain(offload, layers, x):
    saved = None
    for layer in layers:
        with offload.layer(layer, (), saved) as saved:
            x = layer(x)
    saved.release()
    return x


def test_storages_travel_once_come_back_one_layer_ahead_and_are_freed(monkeypatch):
    torch.manual_seed(0)
    layers, x = [Layer() for _ in range(3)], torch.randn(16, 8, requires_grad=True)
    offload, order = ActivationOffload(CPU, 64), []
    original = module._Layer.fetch
    monkeypatch.setattr(module._Layer, "fetch", lambda self: (order.append(self), original(self))[1])
    wanted = x
    for layer in layers:
        wanted = layer(wanted)
    (dx,) = torch.autograd.grad(wanted.sum(), x)
    out = _chain(offload, layers, x)
    assert offload.bytes_back == 0 and offload.bytes_out > 3 * 16 * 8 * 4
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, dx)
    assert offload.bytes_back == offload.bytes_out, "a storage came back twice, or not at all"
    assert len(dict.fromkeys(order)) == 3
    first, second = list(dict.fromkeys(order))[:2]
    assert order.index(second) <= 1 and first is not second, "the second layer's fetch must start when the first one asks, not when its own turn comes"
    del out, first, second
    order.clear()
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, module._Entry)], "host memory outlives its graph"


def test_parameters_rows_and_small_tensors_stay():
    layer, x = Layer(), torch.randn(16, 8, requires_grad=True)
    offload = ActivationOffload(CPU, 1)
    with offload.layer(layer, (x,), None):
        y = x @ layer.weight
    y.sum().backward()
    assert offload.bytes_out == 0
    with ActivationOffload(CPU, 1 << 20).layer(layer, (), None) as saved:
        layer(x)
    assert not saved.entries


def test_a_storage_written_after_it_was_saved_is_copied_again():
    offload, layer = ActivationOffload(CPU, 1), nn.Identity()
    a, b = (torch.ones(8, requires_grad=True) for _ in range(2))
    buffer = torch.full((16,), 2.0)
    with offload.layer(layer, (), None):
        first = a * buffer[:8]
        with torch.no_grad():
            buffer[8:] = 5.0
        second = b * buffer[8:]
    (first.sum() + second.sum()).backward()
    assert a.grad.eq(2).all() and b.grad.eq(5).all()
