"""Muon's pieces. Why it matters: a wrong norm or a wrong owner trains to a slightly worse model without any error.

Not covered: convergence, and NCCL.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.optim.config import OptimConfig, ScheduleKind
from megamoe.optim.muon import Blocks, Muon, plan_units
from megamoe.optim.newton_schulz import newton_schulz
from megamoe.optim.schedule import learning_rate
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import Axis, build_mesh
from megamoe.testing.distributed import run_distributed


def test_newton_schulz_moves_singular_values_to_one_and_keeps_vectors():
    u, _ = torch.linalg.qr(torch.randn(3, 24, 16, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64))
    s = torch.linspace(0.3, 3.0, 16, dtype=torch.float64).expand(3, 16)
    out = newton_schulz(u @ torch.diag_embed(s) @ v.mT)
    inner = u.mT @ out @ v
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 1e-9
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3


def test_zero_matrix_gives_zero_update():
    assert newton_schulz(torch.zeros(2, 4, 6)).abs().max() == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 5))
def test_plan_gives_every_block_to_exactly_one_owner_without_overlap(shapes, num_owners):
    blocks = [Blocks(*s) for s in shapes]
    units = plan_units(blocks, num_owners)
    for index, b in enumerate(blocks):
        assert sorted(j for u in units if u.index == index for j in range(u.start, u.stop)) == list(range(b.count))
    for owner in range(num_owners):
        spans = sorted((u.offset, u.offset + (u.stop - u.start) * blocks[u.index].numel) for u in units if u.owner == owner)
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:])) and (not spans or spans[0][0] == 0)


def test_plan_balances_cost():
    blocks = [Blocks(96, 128, 7168)] * 3 + [Blocks(112, 3072, 3584)]
    units = plan_units(blocks, 8)
    load = [sum(blocks[u.index].cost * (u.stop - u.start) for u in units if u.owner == o) for o in range(8)]
    assert max(load) <= 1.25 * sum(load) / 8


def _model() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = []
    for count, rows, cols in [(4, 3, 6), (1, 5, 5), (3, 4, 2)]:
        p = torch.nn.Parameter(torch.randn(count * rows, cols, generator=generator, dtype=torch.float64))
        p.megamoe = SimpleNamespace(muon_view=lambda p, s=(count, rows, cols): s, weight_decay=rows != 5, muon_blocks=("heads", rows), is_expert=False, global_shape=tuple(p.shape))
        params.append(p)
    return params


def _loss(params, sample: int) -> torch.Tensor:
    x = [torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * sample + i), dtype=p.dtype) for i, p in enumerate(params)]
    return sum(((p * xi).sum().sin() + (p * xi).pow(2).sum()) for p, xi in zip(params, x, strict=True))


def _train(world_size: int) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 60, deepspeed=False):
        mesh = build_mesh(ParallelConfig())
        params = _model()
        muon = Muon(params, mesh.dp_cp, momentum=0.9, ns_steps=5, weight_decay=0.1)
        for step in range(3):
            for sample in range(mesh.dp.rank, 4, mesh.dp.size):
                _loss(params, 4 * step + sample).backward()
            muon.reduce()
            square = muon.squared_norm()
            if mesh.world.group is not None:
                torch.distributed.all_reduce(square)
            scale = (1.0 / square.sqrt()).clamp(max=1.0)
            muon.step(0.02, scale)
        return [p.detach() for p in params]


def _literal() -> list[torch.Tensor]:
    params = _model()
    momenta = [torch.zeros_like(p) for p in params]
    shapes = [p.megamoe.muon_view(p) for p in params]
    for step in range(3):
        grads = torch.autograd.grad(sum(_loss(params, 4 * step + s) for s in range(4)), params)
        scale = min(1.0, 1.0 / sum(g.square().sum() for g in grads).sqrt().item())
        with torch.no_grad():
            for p, m, g, (count, rows, cols) in zip(params, momenta, grads, shapes, strict=True):
                g = g * scale
                m.mul_(0.9).add_(g)
                p.mul_(1 - 0.02 * 0.1 * p.megamoe.weight_decay)
                for j in range(count):
                    rowslice = slice(j * rows, (j + 1) * rows)
                    p[rowslice] -= 0.02 * 0.2 * max(rows, cols) ** 0.5 * newton_schulz((g + 0.9 * m)[rowslice][None])[0]
    return [p.detach() for p in params]


@pytest.mark.parametrize("world_size", [1, 3])
def test_muon_over_ranks_equals_the_rule_written_out(world_size):
    expected = _literal()
    for params in run_distributed(_train, world_size, world_size):
        for got, want in zip(params, expected, strict=True):
            assert (got - want).abs().max() < 1e-12


def test_single_axis_needs_no_process_group():
    params = _model()
    muon = Muon(params, Axis(), momentum=0.9, ns_steps=5, weight_decay=0.0)
    _loss(params, 0).backward()
    assert params[0].grad is None
    muon.reduce()
    muon.step(0.1, torch.ones(()))
    assert muon.grad_flat.abs().max() == 0


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_schedule_warms_up_to_the_peak_and_never_leaves_its_bounds(kind):
    config = OptimConfig(lr=2.0, schedule=kind, warmup_fraction=0.1, min_lr_ratio=0.25)
    rates = [learning_rate(config, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == pytest.approx(2.0) and rates.index(max(rates)) in (9, 10)
    assert min(rates[10:]) == pytest.approx(2.0 if kind is ScheduleKind.constant else 0.5)
    assert rates[-1] == pytest.approx(2.0 if kind is ScheduleKind.constant else 0.5)


def test_experts_get_views_of_the_gradient_buffer_in_their_own_order():
    """Kernels add into these views; a view of another owner's place would hand one expert's gradient to the next."""
    p = torch.nn.Parameter(torch.randn(8, 4, 12))
    p.megamoe = SimpleNamespace(muon_view=lambda p: tuple(p.shape), muon_blocks=None, is_expert=True, global_shape=(8, 4, 12), weight_decay=False)
    muon = Muon([p], Axis(4, 1, (0, 1, 2, 3)), momentum=0.9, ns_steps=5, weight_decay=0.0)
    assert len(p.main_grad) > 1 and sum(run.shape[0] for run in p.main_grad) == 8
    grad, first = torch.randn(8, 4, 12), 0
    for run in p.main_grad:
        run.add_(grad[first : first + run.shape[0]])
        first += run.shape[0]
    through_kernels = muon.grad_flat.clone()
    muon.discard()
    (p * grad).sum().backward()
    assert p.grad is None and torch.equal(muon.grad_flat, through_kernels)
