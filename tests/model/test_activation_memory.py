"""Activation memory is measured at the allocator, not guessed. Why it matters: people choose depth, AttnRes kind and recompute
policy by these figures. Not covered: the GPU's counter, which is torch's own.
"""

from __future__ import annotations

import gc

import torch

from launch.schema import compose
from megamoe.testing.memory import SavedBytes, activation_memory, peak_on_cpu
from megamoe.testing.small import SMALL_MODEL

MIB = 2**20


def test_peak_is_that_of_the_moment_and_not_the_sum():
    def run():
        a = torch.empty(3 * MIB, dtype=torch.uint8)
        del a
        b, c = torch.empty(MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
        del b, c
        return torch.empty(MIB // 2, dtype=torch.uint8)

    assert peak_on_cpu(run) == 3 * MIB


def test_saved_storages_count_once_while_the_graph_lives_and_parameters_do_not():
    weight, x = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(32, 64, requires_grad=True)
    saved = SavedBytes([weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept.tensor):
        y = x @ weight  # keeps x, and the weight, which does not count
        z = y * y  # keeps y twice
        out = (z.view(-1) * z.view(-1)[:1]).tanh()  # keeps z, as views, and its own output
    assert saved.now == saved.peak == 4 * 32 * 64 * 4
    out.sum().backward()
    del y, z, out
    gc.collect()
    assert saved.now == 0
    torch.testing.assert_close(x.grad, torch.autograd.grad(_again(x, weight).sum(), x)[0])


def _again(x, weight):
    z = (x @ weight).square()
    return (z.view(-1) * z.view(-1)[:1]).tanh()


def test_rows_cost_memory_and_recomputation_keeps_little_else():
    common = [*SMALL_MODEL, "train.seq_len=64", "train.global_batch_tokens=64", "train.micro_batch_tokens=64", "train.device=cpu"]
    plain, block, full = (
        activation_memory(compose([*common, "train.recompute=full", f"model.attn_res={kind}"]), torch.device("cpu")) for kind in ('"off"', "block", "full")
    )
    row_bytes = 64 * 32 * 4
    assert plain.saved_bytes < block.saved_bytes < full.saved_bytes < 40 * row_bytes
    # Ten rows; the plain run keeps six running sums in their place.
    assert full.saved_bytes - plain.saved_bytes >= 4 * row_bytes
    assert all(m.peak_bytes >= m.saved_bytes for m in (plain, block, full))
