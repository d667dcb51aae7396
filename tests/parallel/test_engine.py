"""DeepSpeed's ZeRO-1 engine equals the plain engine. Why it matters: every private name of DeepSpeed that the project uses
is behind these comparisons; a wrong factor or a wrong norm trains on without an error.

SGD with an active clip is used because AdamW hides a wrong norm. Not covered: NCCL, and sharded (tp, pp, ep) parameters.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megamoe.optim.config import OptimConfig, OptimizerKind
from megamoe.optim.optimizer import build_optimizer
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import build_mesh
from megamoe.testing.distributed import run_distributed

SAMPLES = 4


class Toy(nn.Module):
    """A matrix for Muon, a vector and a parameter that must stay fp32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.matrix = nn.Parameter(torch.randn(6, 8, generator=g).to(dtype))
        self.vector = nn.Parameter(torch.randn(6, generator=g).to(dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.kept = nn.Parameter((torch.rand(6, generator=g) + 0.001).to(dtype if dtype == torch.float64 else torch.float32))
        for name, p in self.named_parameters():
            p.megamoe = SimpleNamespace(optimizer="muon" if name == "matrix" else "adamw", weight_decay=name == "matrix", keep_wide=name == "kept", muon_view=lambda p: (2, 3, 8),
                                        muon_blocks=("heads", 3), is_expert=False, global_shape=tuple(p.shape), reduce_axis="stage")

    def forward(self, x):
        return ((x @ self.matrix.T + self.vector).to(self.kept.dtype) * self.kept).tanh().square().sum()


def _sample(index: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(index))


def _train(mesh, kind: str, deepspeed: bool, dtype: torch.dtype, steps: int, restart_at: int = -1):
    config = OptimConfig(kind=OptimizerKind(kind), lr=0.05, clip_norm=0.5, weight_decay=0.1)

    def build():
        model = Toy(dtype)
        return model, build_optimizer(model, config, mesh, deepspeed=deepspeed, bucket_elements=1000)

    model, optimizer = build()
    norms = []
    for step in range(steps):
        if step == restart_at:
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            state, adam_step = [f.values.clone() for f in optimizer.state_fragments()], optimizer.adam_step()
            model, optimizer = build()
            model.load_state_dict(weights)
            optimizer.create_state(adam_step)
            for fragment, values in zip(optimizer.state_fragments(), state, strict=True):
                fragment.values.copy_(values)
        for i in range(mesh.dp.rank, SAMPLES, mesh.dp.size):
            with optimizer.micro_batch():
                (model(_sample(100 * step + i).to(dtype)) / SAMPLES).backward()
        norms.append(optimizer.step(0.05).grad_norm)
    return norms, {k: v.detach().clone() for k, v in model.named_parameters()}


FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
CASES = {
    "plain sgd": ("sgd", False, FP32, 3),
    "plain muon": ("muon", False, FP32, 3),
    "plain muon fp64": ("muon", False, FP64, 4),
    "plain muon fp64 restarted": ("muon", False, FP64, 4, 2),
    "deepspeed sgd": ("sgd", True, FP32, 3),
    "deepspeed muon": ("muon", True, FP32, 4),
    "deepspeed muon restarted": ("muon", True, FP32, 4, 2),
    "deepspeed bf16": ("muon", True, BF16, 4),
    "deepspeed bf16 restarted": ("muon", True, BF16, 4, 2),
}


def _poisoned(mesh, deepspeed: bool, dtype: torch.dtype):
    """A step whose AdamW-side gradient is NaN on the last rank alone, then a good one."""
    model = Toy(dtype)
    optimizer = build_optimizer(model, OptimConfig(lr=0.05, clip_norm=0.5), mesh, deepspeed=deepspeed, bucket_elements=1000)
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    updates = []
    for poison in (True, False):
        hook = model.vector.register_hook(lambda g: g * float("nan")) if poison and mesh.world.rank == mesh.world.size - 1 else None
        for i in range(mesh.dp.rank, SAMPLES, mesh.dp.size):
            with optimizer.micro_batch():
                (model(_sample(i).to(dtype)) / SAMPLES).backward()
        updates.append(optimizer.step(0.05))
        if hook is not None:
            hook.remove()
        if poison:
            unchanged = all(torch.equal(v, before[k]) for k, v in model.named_parameters())
    return updates[0].skipped, unchanged, updates[1].skipped, updates[1].grad_norm, {k: v.detach().clone() for k, v in model.named_parameters()}


POISONED = {"plain fp32": (False, FP32), "deepspeed fp32": (True, FP32), "deepspeed bf16": (True, BF16)}


def _all_cases():
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 60, deepspeed=True):
        mesh = build_mesh(ParallelConfig())
        return {name: _train(mesh, *case) for name, case in CASES.items()} | {f"poisoned {name}": _poisoned(mesh, *case) for name, case in POISONED.items()}


@pytest.fixture(scope="module")
def results():
    """Results of every case by world size, each a list over ranks. One process start per world size: it costs seconds."""
    return {n: run_distributed(_all_cases, n) for n in (1, 2)}


def _difference(a, b) -> float:
    return max(
        max(abs(x - y) / abs(y) for x, y in zip(a[0], b[0])),
        max((p.double() - q.double()).abs().max().item() for p, q in zip(a[1].values(), b[1].values(), strict=True)),
    )


def test_the_clip_is_active(results):
    assert all(norm > 0.5 for norm in results[1][0]["plain sgd"][0]), "or these tests would not see a wrong norm"


@pytest.mark.parametrize("world_size", [1, 2])
def test_deepspeed_engine_equals_plain_engine_fp32(results, world_size):
    for rank in results[world_size]:
        assert _difference(rank["deepspeed sgd"], results[1][0]["plain sgd"]) < 1e-6


def test_muon_beside_deepspeed_is_independent_of_ranks(results):
    for rank in results[2]:
        assert _difference(rank["deepspeed muon"], results[1][0]["deepspeed muon"]) < 1e-6


def test_plain_engine_is_independent_of_ranks_in_float64(results):
    for rank in results[2]:
        assert _difference(rank["plain muon fp64"], results[1][0]["plain muon fp64"]) < 1e-12


def test_bf16_engine_keeps_marked_parameters_in_fp32_and_accumulates_in_fp32(results):
    (norms, params), (single_norms, single) = results[2][0]["deepspeed bf16"], results[1][0]["deepspeed bf16"]
    assert params["kept"].dtype == torch.float32 and params["matrix"].dtype == torch.bfloat16
    assert params["kept"].sub(single["kept"]).abs().max() < 1e-4
    assert max(abs(a - b) / b for a, b in zip(norms, single_norms, strict=True)) < 1e-2


@pytest.mark.parametrize("case", ["plain muon fp64", "deepspeed muon", "deepspeed bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_restored_optimizer_continues_bit_for_bit(results, world_size, case):
    for rank in results[world_size]:
        straight, resumed = rank[case], rank[case + " restarted"]
        assert straight[0] == resumed[0]
        assert all(torch.equal(p, q) for p, q in zip(straight[1].values(), resumed[1].values(), strict=True))


@pytest.mark.parametrize("case", POISONED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank_and_side(results, world_size, case):
    for rank in results[world_size]:
        skipped, unchanged, skipped_next, norm, params = rank[f"poisoned {case}"]
        assert skipped and unchanged
        assert not skipped_next and 0 < norm < float("inf")
        assert all(p.isfinite().all() for p in params.values())
