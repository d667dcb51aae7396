"""QK-clip. Why it matters: logits that grow without bound end a run in NaN weeks later; a clip that scales the wrong rows, or
weights but not their masters, changes the model silently or is undone by the next step.

Layouts are proved in tests/parallel/test_prove.py, maxima in tests/ops/test_max_logit.py. Not covered: whether a threshold suits a model, and NCCL.
"""

from __future__ import annotations

import pytest
import torch

from launch.schema import compose
from megamoe.layers.config import MLAConfig, RopeKind
from megamoe.layers.mla import MLA
from megamoe.layers.stream import Stream
from megamoe.optim.config import OptimConfig, OptimizerKind, QKClipConfig
from megamoe.optim.optimizer import build_optimizer
from megamoe.optim.qk_clip import QKClip, row_factors
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import Mesh, build_mesh
from megamoe.testing.distributed import run_distributed
from megamoe.testing.models import cu_seqlens, toy_config, toy_model
from megamoe.utils.errors import UserError

F64 = torch.float64


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"rope": RopeKind.rotary}, {"rope": RopeKind.yarn, "rope_factor": 4.0}], ids=str)
def test_clipped_heads_shrink_to_the_threshold_and_others_keep_every_bit(changes):
    config = MLAConfig(**{**dict(num_heads=3, q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8), **changes})
    mla = MLA(24, config).double()
    with torch.no_grad():
        for p in mla.parameters():
            p.normal_(0, 0.5)
    stream, x = Stream.build(11, cu_seqlens(7, 4)), torch.randn(11, 24, dtype=F64)
    mla.watch_logits = True
    mla(x, stream)
    before, (q0, k0, v0) = mla.max_logit_H, mla.project(x, stream.positions_T)
    tau = before.sort().values[:2].mean()  # one head below, two above
    gamma = torch.where(before > tau, tau / before, 1.0)
    with torch.no_grad():
        for weight, factor in row_factors(mla, gamma).items():
            weight.mul_(factor[:, None])
    mla.max_logit_H = None
    mla(x, stream)
    torch.testing.assert_close(mla.max_logit_H, before.clamp(max=tau), rtol=1e-12, atol=0)
    q, k, v = mla.project(x, stream.positions_T)
    torch.testing.assert_close(torch.einsum("thq,shq->hts", q, k), torch.einsum("thq,shq->hts", q0, k0) * gamma[:, None, None], rtol=1e-10, atol=1e-12)
    kept = before.argmin()
    assert torch.equal(q[:, kept], q0[:, kept]) and torch.equal(k[:, kept], k0[:, kept]) and torch.equal(v, v0)


@pytest.mark.parametrize("recompute", ["attention", "full"])
def test_recompute_and_evaluation_do_not_move_the_maxima(recompute):
    tokens = torch.randint(0, 50, (3, 20))

    def maxima(recompute: str):
        model = toy_model(toy_config(), recompute=recompute)
        clip = QKClip(model, QKClipConfig(tau=1e-3), Mesh())
        clip.begin_step(0)
        for row in tokens:
            model(row, cu_seqlens=cu_seqlens(8, 12)).sum().backward()
        seen = [m.max_logit_H.clone() for m in clip.layers]
        with torch.no_grad():
            model.embed_tokens.weight *= 10
            model(tokens[0], cu_seqlens=cu_seqlens(8, 12))
        assert all(torch.equal(a, m.max_logit_H) for a, m in zip(seen, clip.layers)), "evaluation moved a maximum"
        return torch.stack(seen)

    assert torch.equal(maxima(recompute), maxima("none"))


def test_only_every_nth_step_is_watched_and_a_skipped_step_leaves_nothing():
    model = toy_model(toy_config(), dtype=torch.float32)
    optimizer = build_optimizer(model, OptimConfig(lr=0.0, qk_clip=QKClipConfig(tau=1e-3, every=2)), Mesh(), deepspeed=False, bucket_elements=1000)
    layers, clipped = optimizer.qk_clip.layers, []
    for step in range(4):
        optimizer.begin_step(step)
        before = layers[0].kv_b_proj.weight.clone()
        loss = model(torch.arange(20), cu_seqlens=cu_seqlens(20)).sum()
        (loss * float("nan") if step == 2 else loss).backward()
        assert (layers[0].max_logit_H is not None) == (step % 2 == 0)
        assert optimizer.step(0.0).skipped == (step == 2)
        assert layers[0].max_logit_H is None
        clipped.append(not torch.equal(before, layers[0].kv_b_proj.weight))
    assert clipped == [True, False, False, False]


KINDS = {"plain muon": ("muon", False, torch.float32), "plain adamw": ("adamw", False, torch.float32), "zero muon": ("muon", True, torch.bfloat16),
         "zero adamw": ("adamw", True, torch.bfloat16), "zero adamw fp32": ("adamw", True, torch.float32)}  # fmt: skip


def _clip_alone(mesh, kind: str, deepspeed: bool, dtype: torch.dtype) -> float:
    """A step with rate 0: weights become masters times factors, rounded once. Returns the largest difference to that.

    The second step starts from masters that bf16 does not hold: factors applied to weights instead would show there.
    """
    model = toy_model(toy_config(), dtype=dtype)
    config = OptimConfig(kind=OptimizerKind(kind), lr=0.0, weight_decay=0.0, qk_clip=QKClipConfig(tau=0.05))
    optimizer = build_optimizer(model, config, mesh, deepspeed=deepspeed, bucket_elements=1000)
    masters = {p: p.detach().float().clone() for layer in optimizer.qk_clip.layers for p in row_factors(layer, torch.ones(2))}
    worst = 0.0
    for step in range(2):
        optimizer.begin_step(step)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(3.0)  # both steps clip; no master of an attention weight knows
            for layer in optimizer.qk_clip.layers:
                layer.q_a_layernorm.weight.mul_(4.0 ** (step + 1))  # engines undo it when they write their masters
        with optimizer.micro_batch():
            (model(torch.arange(20) + mesh.dp.rank, cu_seqlens=cu_seqlens(13, 7)).float().square().mean()).backward()
        factors = {p: f for layer in optimizer.qk_clip.layers for p, f in row_factors(layer, _gamma(mesh, layer, 0.05)).items()}
        assert any((f < 1).any() for f in factors.values()), "nothing is clipped"
        optimizer.step(0.0)
        for p, factor in factors.items():
            masters[p] = masters[p] * factor[:, None]
            worst = max(worst, ((masters[p].to(dtype) - p.detach()).abs().max() / p.detach().abs().max()).item())
    return worst


def _gamma(mesh, layer: MLA, tau: float) -> torch.Tensor:
    top = layer.max_logit_H.clone()
    if mesh.dp.group is not None:
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=mesh.dp.group)
    return (tau / top).clamp(0, 1).where(top > tau, 1.0)


def _all_kinds():
    with process_group(torch.device("cpu"), 60, deepspeed=True):
        mesh = build_mesh(ParallelConfig())
        return {name: _clip_alone(mesh, *case) for name, case in KINDS.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_are_scaled_and_weights_are_rounded_from_them_once(ranks):
    for rank in run_distributed(_all_kinds, ranks):
        for name, worst in rank.items():
            assert worst <= (1e-6 if KINDS[name][2] is torch.float32 else 0.0), (name, worst)


@pytest.mark.parametrize("override, hint", [("optim.qk_clip.tau=-1", "optim.qk_clip.tau"), ("optim.qk_clip.every=0", "tau=0 switches")])
def test_values_that_make_no_sense_are_refused(override, hint):
    with pytest.raises(UserError, match=hint):
        compose([override])
