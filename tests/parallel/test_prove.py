"""Every layout trains the model of one rank, and the proof of it can fail.

Why it matters: a wrong composition of parallel axes trains on to a slightly worse model; nothing crashes. Loss, every
reduced gradient, norm, router biases and every rank's weights after two optimizer steps are compared with one rank.

A quick subset: every axis, both pipeline forms, both engines, four axes at once. The whole matrix (`tools/prove_layout.py
--matrix`) takes longer. Not covered: NCCL, bf16, several hosts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.layers.config import QAT, Placement
from megamoe.model.config import AttnResKind, GateKind, KDAConfig, MLAConfig, MTPConfig, OutputGate, RopeKind
from megamoe.optim.config import OptimizerKind
from megamoe.parallel.config import ParallelConfig
from megamoe.testing.faults import FAULTS
from megamoe.testing.pool import RankPool
from megamoe.testing.proof import CLIP_NORM, LIMITS, Case, Prover, small_model

PLAIN = small_model()
RICH = small_model(mtp=MTPConfig(num_layers=1), tie_embeddings=True)
BALANCED = small_model(moe=replace(PLAIN.moe, placement=Placement.balanced))
QUANTIZED = small_model(num_layers=4, full_attn_layers=[2, 4], moe=replace(PLAIN.moe, expert_size=32, latent=32, qat=QAT.mxfp4))
OTHER = small_model(
    attn_res=AttnResKind.full,
    kda=KDAConfig(num_heads=4, head_dim=8, gate=GateKind.softplus, output_gate=OutputGate.lowrank),
    mla=MLAConfig(num_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, rope=RopeKind.rotary),
)


@pytest.fixture(scope="module")
def prover():
    with RankPool(8) as pool:
        yield Prover(pool.run)


@pytest.fixture(scope="module")
def proved(prover):
    """Verdict and traces of a case, proved once however many tests ask for it."""
    known = {}

    def prove(c: Case):
        if repr(c) not in known:
            known[repr(c)] = prover.prove_with_traces(c)
        return known[repr(c)]

    return prove


def case(model, world, engine="plain", optimizer="muon", recompute="none", packing=True, fault="", qk_tau=0.0, **parallel) -> Case:
    return Case(model, ParallelConfig(**parallel), world, engine, OptimizerKind(optimizer), recompute, packing, fault=fault, qk_tau=qk_tau)


CASES = [
    case(PLAIN, 4, tp=2, ep=4),
    case(PLAIN, 4, cp=4, recompute="full"),
    case(RICH, 4, pp=2, cp=2, ep=2),
    case(RICH, 4, pp=2, vpp=2, tp=2, ep=2, recompute="attention"),
    case(OTHER, 4, pp=4, stage_layers=[1, 2, 1, 1], optimizer="adamw", packing=False),
    case(OTHER, 4, tp=2, cp=2, ep=2, recompute="experts"),
    case(RICH, 8, pp=2, tp=2, cp=2, ep=4),
    case(RICH, 4, pp=2, vpp=2, tp=2, ep=2, engine="deepspeed", optimizer="sgd"),
    case(PLAIN, 4, tp=2, cp=2, ep=4, engine="deepspeed", optimizer="sgd"),
]


@pytest.mark.parametrize("proof", CASES, ids=lambda c: f"{c.engine}-{c.name}-{c.optimizer.name}")
def test_layout_trains_the_model_of_one_rank(proved, proof):
    verdict, ranks = proved(proof)
    assert verdict.passed, verdict
    assert all(n > 1.5 * CLIP_NORM for n in ranks[0]["norm"]), "the clip must be active for a wrong norm to show in the weights"
    assert ranks[0]["bias"][0][:, : proof.model.moe.num_experts].abs().max() > 0.01, "router biases must move"
    # Part of the verdict; here that there is something to judge. A rank meets a row again only where it has several chunks.
    p = proof.parallel
    assert len(verdict.boundaries) == (p.pp * p.vpp - 1 if p.pp > 1 else 0)
    assert any(b.cached < b.naive for b in verdict.boundaries) == (p.vpp > 1)


CLIPPED = [
    case(PLAIN, 4, tp=2, cp=2, qk_tau=0.25),
    case(RICH, 4, pp=2, qk_tau=0.25, optimizer="adamw", recompute="full"),
    case(PLAIN, 4, tp=2, qk_tau=0.25, engine="deepspeed", optimizer="sgd"),
]


@pytest.mark.parametrize("proof", CLIPPED, ids=lambda c: f"{c.engine}-{c.name}-{c.optimizer.name}")
def test_qk_clip_is_that_of_one_rank(proved, proof):
    """Both steps clip, and one of them not every head: maxima over the wrong ranks would move the border."""
    verdict, ranks = proved(proof)
    assert verdict.passed, verdict
    heads = proof.model.mla.num_heads * (len(proof.model.full_attn_layers) + proof.model.mtp.num_layers)
    for r in ranks:
        clipped = [step["heads_clipped"] for step in r["qk_clip"]]
        assert 0 < min(clipped) < heads and max(clipped) <= heads, r["qk_clip"]
        assert r["qk_clip"][0]["max_logit"] == pytest.approx(ranks[0]["qk_clip"][0]["max_logit"], rel=1e-6)


CAUGHT = {
    "wrong_group": case(PLAIN, 2, tp=2, fault="wrong_group"),
    "missing_halo": case(PLAIN, 2, cp=2, fault="missing_halo"),
    "doubled_gradient": case(PLAIN, 2, fault="doubled_gradient"),
    "histogram_counted_twice": case(PLAIN, 2, recompute="full", fault="histogram_counted_twice"),
    "norm_counts_replicas": case(PLAIN, 2, fault="norm_counts_replicas"),
    "stale_row": case(PLAIN, 2, pp=2, fault="stale_row"),
    "row_sent_twice": case(PLAIN, 2, pp=2, fault="row_sent_twice"),
    "unflagged_tp_weight": case(PLAIN, 2, tp=2, optimizer="adamw", fault="unflagged_tp_weight"),
    "cp_loss_scale": case(PLAIN, 2, cp=2, fault="cp_loss_scale"),
    "wrong_head_slice": case(PLAIN, 2, tp=2, fault="wrong_head_slice"),
    "expert_id_shifted": case(PLAIN, 2, ep=2, fault="expert_id_shifted"),
    "logit_maxima_of_the_wrong_group": case(PLAIN, 4, tp=2, cp=2, qk_tau=0.25, fault="logit_maxima_of_the_wrong_group"),
    "stale_rounded_weights": case(QUANTIZED, 2, ep=2, fault="stale_rounded_weights"),
    "lent_gradient_lost": case(BALANCED, 2, ep=2, fault="lent_gradient_lost"),
}


def test_every_fault_has_a_case():
    assert set(CAUGHT) == set(FAULTS) - {""}


@pytest.mark.parametrize("name", CAUGHT)
def test_planted_fault_is_caught(prover, proved, name):
    twin, _ = proved(replace(CAUGHT[name], fault=""))
    assert twin.passed, twin
    verdict = prover.prove(CAUGHT[name])
    assert not verdict.passed, f"{name} went unnoticed: {verdict}"
    assert verdict.worst > 1e4 * LIMITS["plain"], f"{name} hardly shows: {verdict}"
