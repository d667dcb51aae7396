"""A user's configuration made small enough to prove on eight CPU ranks, with everything kept that could go wrong.

Kept: which axes are above one, the kinds of layers in order (first ones and last two), AttnRes kind and cuts inside blocks,
every switch of the model (gates, output gates, rope, latent, shared experts, balancing, MTP, tied embeddings), the
optimizer and the recompute policy. Shrunk: widths, heads, experts, layers, axis sizes.
"""

from __future__ import annotations

from dataclasses import replace

from megamoe.model.config import QAT, ModelConfig
from megamoe.parallel.config import ParallelConfig
from megamoe.testing.proof import NORM_EPS, Case
from megamoe.train.config import Config
from megamoe.utils.errors import UserError

MAX_RANKS = 8


def shrink(config: Config) -> tuple[Case, list[tuple[str, str, str]]]:
    """The case to prove, and what became of each axis and size as (what, yours, proved).

    Raises:
        UserError: the layout has more axes above one than eight ranks can hold: none is dropped silently.
    """
    parallel, world = _shrink_parallel(config.parallel)
    model = _shrink_model(config.model, parallel)
    if config.parallel.stage_layers:
        parallel = replace(parallel, stage_layers=_shrink_stages(config.parallel.stage_layers, model.num_layers, parallel.pp * parallel.vpp))
    case = Case(model, parallel, world, optimizer=config.optim.kind, recompute=config.train.recompute.value)
    p, q, m, n = config.parallel, parallel, config.model, model
    mapping = [(axis, str(getattr(p, axis)), str(getattr(q, axis))) for axis in ("pp", "vpp", "cp", "tp", "ep")]
    mapping += [
        ("dp", str(p.dp or "what is left"), str(q.dp)),
        ("layers", _kinds(m), _kinds(n)),
        ("AttnRes", f"{m.attn_res.name}, {m.attn_res_block_size} layers a block", f"{n.attn_res.name}, {n.attn_res_block_size}"),
        ("heads KDA / MLA", f"{m.kda.num_heads} / {m.mla.num_heads}", f"{n.kda.num_heads} / {n.mla.num_heads}"),
        ("experts, top-k", f"{m.moe.num_experts}, {m.moe.top_k}", f"{n.moe.num_experts}, {n.moe.top_k}"),
    ]
    return case, mapping


def _shrink_parallel(p: ParallelConfig) -> tuple[ParallelConfig, int]:
    sizes = {axis: min(getattr(p, axis), 2) for axis in ("pp", "cp", "tp")}
    sizes["dp"] = min(max(p.dp, 1), 2)
    if p.ep > 1 and sizes["cp"] * sizes["tp"] * sizes["dp"] == 1:
        sizes["dp"] = 2
    world = sizes["pp"] * sizes["cp"] * sizes["tp"] * sizes["dp"]
    if world > MAX_RANKS:
        above = " · ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise UserError(f"parallel={above}: needs {world} ranks even when every axis is 2, the proof has {MAX_RANKS}; prove it without one axis at a time, parallel.dp=1 first")
    # Axes that were larger than 2 become 4 where there is room.
    for axis in ("cp", "pp", "tp", "dp"):
        if getattr(p, axis) >= 4 and world * 2 <= MAX_RANKS:
            sizes[axis], world = 4, world * 2
    fold = sizes["dp"] * sizes["cp"] * sizes["tp"]
    ep = max(d for d in range(1, fold + 1) if fold % d == 0 and d <= p.ep)
    return ParallelConfig(**sizes, ep=ep, vpp=min(p.vpp, 2)), world


def _shrink_model(m: ModelConfig, p: ParallelConfig) -> ModelConfig:
    layers = min(m.num_layers, max(6, p.pp * p.vpp + 1))
    # The first ones and the last two: where the pattern starts and where it ends.
    kept = list(range(m.num_layers)) if layers == m.num_layers else [*range(layers - 2), m.num_layers - 2, m.num_layers - 1]
    full = [i + 1 for i, n in enumerate(kept) if m.is_full_attn(n)]
    dense = sum(not m.is_moe(n) for n in kept)
    heads, experts = 2 * p.tp, max(8, 2 * p.ep)
    # MXFP4 rounds in groups of 32.
    width = 8 if m.moe.qat is QAT.off else 32
    return replace(
        m,
        name="proof",
        vocab_size=48,
        d_model=16 if m.moe.latent is not None else max(16, width),
        num_layers=layers,
        full_attn_layers=full,
        attn_res_block_size=min(m.attn_res_block_size, 2),
        kda=replace(m.kda, num_heads=heads, head_dim=8, norm_eps=NORM_EPS, backend="auto"),
        mla=replace(
            m.mla, num_heads=heads, q_lora_rank=None if m.mla.q_lora_rank is None else 12, kv_lora_rank=8, qk_nope_head_dim=8,
            qk_rope_head_dim=min(m.mla.qk_rope_head_dim, 4), v_head_dim=8 if m.mla.v_head_dim == m.mla.qk_nope_head_dim else 6, backend="auto",
        ),
        ffn=replace(m.ffn, dense_size=24),
        moe=replace(
            m.moe, num_experts=experts, top_k=min(m.moe.top_k, 3), expert_size=width, latent=None if m.moe.latent is None else width,
            num_shared_experts=min(m.moe.num_shared_experts, 2), first_dense_layers=dense, histogram_bins=50, dispatch="auto", grouped_mlp="auto",
        ),
    )  # fmt: skip


def _shrink_stages(given: list[int], layers: int, chunks: int) -> list[int]:
    """Chunks in the proportions of the first `chunks` given ones, each at least one layer."""
    given = given[:chunks]
    sizes = [1] * chunks
    for _ in range(layers - chunks):
        # The next layer goes where the shrunken share lags most behind the given one.
        behind = [want / sum(given) - have / layers for want, have in zip(given, sizes)]
        sizes[behind.index(max(behind))] += 1
    return sizes


def _kinds(m: ModelConfig) -> str:
    kinds = "".join("M" if m.is_full_attn(n) else "K" for n in range(m.num_layers))
    return f"{m.num_layers}: {kinds if len(kinds) <= 16 else kinds[:8] + '…' + kinds[-4:]}, {sum(not m.is_moe(n) for n in range(m.num_layers))} dense"
