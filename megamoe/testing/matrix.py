"""The list of layouts that `tools/prove_layout.py --matrix` proves: every axis alone, in pairs, three and four at once."""

from __future__ import annotations

from dataclasses import replace

from megamoe.layers.config import Placement
from megamoe.model.config import Activation, AttnResKind, Balancing, FFNConfig, GateKind, KDAConfig, MLAConfig, MoEConfig, MTPConfig, OutputGate, QAT, RopeKind
from megamoe.optim.config import OptimizerKind
from megamoe.parallel.config import ParallelConfig
from megamoe.testing.proof import NORM_EPS, Case, small_model

PLAIN = small_model()
TIED = small_model(tie_embeddings=True)
MTP = small_model(mtp=MTPConfig(num_layers=1))
TIED_MTP = small_model(tie_embeddings=True, mtp=MTPConfig(num_layers=1))
FULL = small_model(attn_res=AttnResKind.full, num_layers=6, full_attn_layers=[3, 6])
RESIDUAL = small_model(attn_res=AttnResKind.off)
KIMI_LINEAR = small_model(
    attn_res=AttnResKind.off,
    kda=KDAConfig(num_heads=4, head_dim=8, norm_eps=NORM_EPS, gate=GateKind.softplus, output_gate=OutputGate.lowrank),
    mla=MLAConfig(num_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, rope=RopeKind.rotary),
    ffn=FFNConfig(dense_size=24, act=Activation.silu),
    moe=MoEConfig(num_experts=8, top_k=3, expert_size=8, latent=None, num_shared_experts=1, balancing=Balancing.sign),
)
THRESHOLD = small_model(moe=MoEConfig(num_experts=8, top_k=2, expert_size=8, latent=8, num_shared_experts=0, balancing=Balancing.threshold))
BALANCED = small_model(moe=replace(PLAIN.moe, placement=Placement.balanced))
# Rounding is a jump: in fp32 a value within noise of a border between two codes lands elsewhere on another layout. Few layers, few chances.
QUANTIZED = small_model(num_layers=4, full_attn_layers=[2, 4], moe=replace(PLAIN.moe, expert_size=32, latent=32, qat=QAT.mxfp4))

MODELS = {
    "block": PLAIN, "balanced": BALANCED, "tied": TIED, "mtp": MTP, "tied+mtp": TIED_MTP, "full": FULL, "residual": RESIDUAL, "kimi-linear": KIMI_LINEAR, "threshold": THRESHOLD, "qat": QUANTIZED,
}  # fmt: skip

# ranks, model, axes, and what else differs from: muon, no recompute, packed.
_ROWS: list[tuple[int, str, dict, dict]] = [
    # One axis.
    (2, "block", {}, {}),
    (4, "tied+mtp", {}, dict(optimizer="adamw")),
    (8, "block", {}, dict(recompute="full")),
    (2, "block", dict(tp=2), {}),
    (4, "mtp", dict(tp=4), {}),
    (2, "tied", dict(tp=2), dict(optimizer="adamw", packing=False)),
    (2, "kimi-linear", dict(tp=2), dict(recompute="full")),
    (2, "block", dict(cp=2), {}),
    (4, "mtp", dict(cp=4), {}),
    (8, "block", dict(cp=8), {}),
    (2, "kimi-linear", dict(cp=2), dict(optimizer="adamw")),
    (4, "full", dict(cp=4), dict(recompute="attention", packing=False)),
    (2, "block", dict(ep=2), {}),
    (4, "threshold", dict(ep=4), {}),
    (8, "block", dict(ep=8), {}),
    (4, "kimi-linear", dict(ep=2), dict(optimizer="adamw")),
    (8, "mtp", dict(ep=4), dict(recompute="experts")),
    (2, "block", dict(pp=2), {}),
    (4, "block", dict(pp=4), {}),
    (2, "tied", dict(pp=2), {}),
    (4, "tied+mtp", dict(pp=4), dict(optimizer="adamw")),
    (2, "full", dict(pp=2), dict(recompute="full")),
    (4, "residual", dict(pp=4), dict(packing=False)),
    (2, "block", dict(pp=2, stage_layers=[1, 4]), {}),
    (4, "full", dict(pp=4, stage_layers=[1, 1, 3, 1]), {}),
    (2, "block", dict(pp=2, vpp=2), {}),
    (2, "tied+mtp", dict(pp=2, vpp=2), dict(optimizer="adamw")),
    (2, "full", dict(pp=2, vpp=3), {}),
    (2, "kimi-linear", dict(pp=2, vpp=2), dict(recompute="full")),
    # Two axes.
    (4, "block", dict(tp=2), {}),
    (8, "tied", dict(tp=2, ep=2), {}),
    (4, "block", dict(tp=2, ep=4), {}),
    (4, "mtp", dict(tp=4, ep=4), dict(recompute="full")),
    (4, "block", dict(cp=2), dict(recompute="full")),
    (4, "kimi-linear", dict(cp=2, ep=4), {}),
    (4, "threshold", dict(cp=4, ep=2), {}),
    (4, "block", dict(tp=2, cp=2), {}),
    (8, "tied+mtp", dict(tp=2, cp=4), {}),
    (8, "kimi-linear", dict(tp=4, cp=2), {}),
    (4, "block", dict(pp=2), {}),
    (8, "tied", dict(pp=4), dict(optimizer="adamw")),
    (4, "block", dict(pp=2, tp=2), {}),
    (8, "tied+mtp", dict(pp=4, tp=2), {}),
    (4, "full", dict(pp=2, cp=2), {}),
    (8, "mtp", dict(pp=2, cp=4), dict(packing=False)),
    (4, "block", dict(pp=2, ep=2), {}),
    (8, "threshold", dict(pp=2, ep=4), dict(recompute="experts")),
    (4, "residual", dict(pp=2, vpp=2, tp=2), {}),
    (4, "block", dict(pp=2, vpp=2, cp=2), {}),
    (4, "tied+mtp", dict(pp=2, vpp=2, ep=2), {}),
    # QK-clip, with a threshold that some heads exceed.
    (2, "block", {}, dict(qk_tau=0.25)),
    (2, "kimi-linear", dict(tp=2), dict(qk_tau=0.25)),
    (2, "full", dict(cp=2), dict(qk_tau=0.25, recompute="full")),
    (2, "mtp", dict(pp=2), dict(qk_tau=0.25)),
    (8, "mtp", dict(pp=2, tp=2, cp=2), dict(qk_tau=0.25, optimizer="adamw")),
    # Experts lent between ranks: the proof's router prefers the lower ids, so that the first owners are above their quota.
    (2, "balanced", dict(ep=2), {}),
    (4, "balanced", dict(ep=4), dict(recompute="experts")),
    (4, "balanced", dict(tp=2, ep=2), dict(recompute="full")),
    (4, "balanced", dict(pp=2, ep=2), {}),
    (8, "balanced", dict(pp=2, tp=2, ep=4), dict(recompute="experts", optimizer="adamw")),
    # Experts trained for MXFP4.
    (8, "qat", dict(pp=2, tp=2, ep=4), dict(recompute="experts")),
    # Three axes.
    (8, "block", dict(tp=2, cp=2), {}),
    (8, "mtp", dict(tp=2, cp=2, ep=8), {}),
    (4, "kimi-linear", dict(tp=2, cp=2, ep=2), dict(optimizer="adamw")),
    (8, "block", dict(pp=2, tp=2), dict(recompute="full")),
    (8, "tied", dict(pp=2, tp=2, cp=2), {}),
    (8, "full", dict(pp=2, tp=2, ep=4), {}),
    (8, "block", dict(pp=2, cp=2, ep=2), {}),
    (4, "tied", dict(pp=2, vpp=2, tp=2, ep=2), {}),
    (8, "mtp", dict(pp=2, vpp=2, tp=2, cp=2), dict(recompute="attention")),
    (8, "kimi-linear", dict(pp=4, tp=2, ep=2), {}),
    # Four at once.
    (8, "tied+mtp", dict(pp=2, tp=2, cp=2, ep=4), {}),
    (8, "block", dict(pp=2, vpp=2, tp=2, cp=2, ep=2), {}),
    (8, "full", dict(pp=2, tp=2, ep=2), dict(recompute="full")),
    (8, "kimi-linear", dict(pp=2, cp=2, ep=4), dict(optimizer="adamw")),
    (8, "tied+mtp", dict(pp=2, vpp=2, cp=2, ep=4), dict(recompute="full", packing=False)),
]


def matrix() -> list[tuple[str, Case]]:
    """(name of the model, case) of every layout, as plain-engine cases."""
    cases = []
    for world, model, axes, other in _ROWS:
        other = {**other, "optimizer": OptimizerKind(other.get("optimizer", "muon"))}
        cases.append((model, Case(MODELS[model], ParallelConfig(**axes), world, **other)))
    return cases
