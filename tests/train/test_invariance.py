"""One step gives the same result however it is cut. Why it matters: a factor that depends on the number of ranks or
micro-batches trains to a slightly worse model without any error.

Covered: loss, every gradient, gradient norm, router biases and weights after two steps; data-parallel ranks and accumulation.
Not covered: the other axes (tests of their own), NCCL, bf16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.schema import compose
from megamoe.data.dataset import build_datasets
from megamoe.data.loader import BatchLoader
from megamoe.optim.optimizer import build_optimizer
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import build_mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.stages import plan_stages
from megamoe.testing.distributed import run_distributed
from megamoe.testing.small import small_run
from megamoe.train.config import EngineKind
from megamoe.train.run import build_model
from megamoe.train.step import step_counts, train_step

STEPS = 2


def _trace(mesh, overrides: list[str]) -> dict:
    """Two optimizer steps; what must not depend on the cut, as plain tensors and floats."""
    config = compose(overrides)
    t = config.train
    data, _ = build_datasets(config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed)
    loader = BatchLoader(data, global_batch_windows=t.global_batch_tokens // t.seq_len, micro_batch_windows=t.micro_batch_tokens // t.seq_len, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size)
    model = build_model(config, mesh, torch.device("cpu"))
    pipeline = Pipeline(model, plan_stages(config.model, config.parallel), mesh)
    gradients = {} if mesh.world.size > 1 else _gradients(pipeline, loader.step_batches(0))
    optimizer = build_optimizer(model, config.optim, mesh, deepspeed=config.engine.kind is EngineKind.deepspeed, bucket_elements=10_000)
    model.train()
    losses, norms = [], []
    for step in range(STEPS):
        batches = loader.step_batches(step * loader.global_batch_windows)
        tokens, num_bytes, _ = step_counts(batches, False, mesh)
        result = train_step(pipeline, optimizer, batches, 0.02, num_tokens=tokens, num_bytes=num_bytes)
        losses.append(result.loss(mesh))
        norms.append(result.update.grad_norm)
    return {"loss": losses, "norm": norms, "gradients": gradients, "bias": result.balance.bias_LE, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def _gradients(pipeline, batches) -> dict[str, torch.Tensor]:
    """Every parameter's gradient of the first step's mean loss."""
    model = pipeline.stage.train()
    pipeline.step(batches, num_tokens=sum(b.num_target_tokens for b in batches))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for m in model.modules():
        if hasattr(m, "reset_stats"):
            m.reset_stats()
    return gradients


def _traces(cases: dict[str, list[str]]) -> dict[str, dict]:
    torch.set_num_threads(1)
    with process_group(torch.device("cpu"), 120, deepspeed=True):
        from megamoe.parallel.config import ParallelConfig

        mesh = build_mesh(ParallelConfig())
        return {name: _trace(mesh, overrides) for name, overrides in cases.items()}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    exact = dict(engine="plain", train__precision="fp64")
    fp32 = dict(optim="sgd", optim__clip_norm=0.3)
    run = lambda **values: small_run(Path(folder), **values)  # noqa: E731
    single = {
        "fp64": run(**exact),
        "fp64 one micro-batch": run(**exact, train__micro_batch_tokens=512),
        "fp64 recompute": run(**exact, train__recompute="full"),
        "fp32 plain": run(engine="plain", **fp32),
        "fp32 deepspeed": run(engine="deepspeed", **fp32),
        "fp32 deepspeed again": run(engine="deepspeed", **fp32),
    }
    double = {"fp64": single["fp64"], "fp32 deepspeed": single["fp32 deepspeed"]}
    return {1: run_distributed(_traces, 1, single)[0], 2: run_distributed(_traces, 2, double)[1]}


def _worst(a: dict, b: dict, floor: float = 1e-12) -> float:
    """Largest relative difference. `floor`: norm below which a tensor is compared absolutely; two fp32 sums in different
    order differ by more than 1e-6 of a parameter that started at zero and has moved by 1e-5 (A_log)."""
    relative = lambda x, y: (x.double() - y.double()).norm().item() / max(y.double().norm().item(), floor)  # noqa: E731
    scalars = max(abs(x - y) / abs(y) for key in ("loss", "norm") for x, y in zip(a[key], b[key], strict=True))
    tensors = [relative(a["bias"], b["bias"])] + [relative(a[k][n], b[k][n]) for k in ("gradients", "weights") for n in a[k] if n in b[k]]
    return max(scalars, *tensors)


def test_step_is_not_trivial(traces):
    base = traces[1]["fp64"]
    assert base["loss"][0] > 5 and base["norm"][0] > 0.3, "the clip must be active"
    assert base["bias"].abs().max() > 1e-3
    assert set(base["gradients"]) == set(base["weights"])


@pytest.mark.parametrize("case", ["fp64 one micro-batch", "fp64 recompute"])
def test_micro_batches_and_recompute_do_not_change_a_step(traces, case):
    assert _worst(traces[1][case], traces[1]["fp64"]) <= 1e-10
    assert torch.equal(traces[1][case]["bias"], traces[1]["fp64"]["bias"])


def test_two_data_parallel_ranks_equal_one(traces):
    assert _worst(traces[2]["fp64"], traces[1]["fp64"]) <= 1e-10
    assert torch.equal(traces[2]["fp64"]["bias"], traces[1]["fp64"]["bias"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_engine_equals_plain_engine(traces, ranks):
    assert _worst(traces[ranks]["fp32 deepspeed"], traces[1]["fp32 plain"], floor=1e-3) <= 1e-6


def test_same_seed_twice_is_bit_equal(traces):
    a, b = traces[1]["fp32 deepspeed"], traces[1]["fp32 deepspeed again"]
    assert a["loss"] == b["loss"] and a["norm"] == b["norm"]
    assert all(torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"])
