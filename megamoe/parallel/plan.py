"""What is split how: from the plain model to the part that one rank holds.

    module            tp                          cp                  ep, folded over dp·cp·tp
    Embedding         vocabulary rows             slice of tokens
    KDA, MLA          heads, gather and scatter   state / latents
    GatedMLP          hidden width, same
    MoE               own shard of tokens                             1/ep of the experts; shared experts as GatedMLP
    head and loss     vocabulary rows             slice of labels
    all else          whole, on shards of tokens

    pp: chunks of consecutive layers; chunk c on rank c mod pp. First chunk: embedding. Last: output mix, head, MTP, and
    the embedding again where the head or the MTP layer uses it.

A rank builds its stage as the plain `Transformer` on the meta device, swaps the modules of the table for their
parallel classes (the same names, fewer heads), and corrects the parameters' records: a local shape that is smaller than
the global one says by itself how the parameter was cut. Nothing else in the project decides what is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megamoe.layers.basic import Embedding, Linear
from megamoe.layers.ffn import GatedMLP
from megamoe.layers.kda import KDA
from megamoe.layers.mla import MLA
from megamoe.layers.moe import MoE
from megamoe.model.config import ModelConfig
from megamoe.model.params import ParamInfo, annotate
from megamoe.model.transformer import Transformer
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.context import ContextKDA, ContextMLA
from megamoe.parallel.mesh import Mesh
from megamoe.parallel.schedule import rows_sent, split_layers
from megamoe.parallel.tensor import ParallelMLP, SequenceShards, VocabParallelEmbedding, VocabParallelLoss, check_divides
from megamoe.utils.errors import check


EMBEDDING = "model.embed_tokens.weight"


class ParallelKDA(SequenceShards, ContextKDA):
    """KDA with 1/tp of the heads on a cp slice."""


class ParallelMLA(SequenceShards, ContextMLA):
    """MLA with 1/tp of the heads on a cp slice."""


@dataclass(frozen=True)
class StagePlan:
    """How layers fall into pipeline chunks.

    Attributes:
        layers: 0-based layers of every chunk, C = pp·vpp of them.
        rows_after: AttnRes rows finished when chunk c has run.
        num_ranks: pp.
    """

    layers: tuple[range, ...]
    rows_after: tuple[int, ...]
    num_ranks: int

    @property
    def num_chunks(self) -> int:
        return len(self.layers)

    def chunks_of(self, rank: int) -> list[int]:
        return list(range(rank, self.num_chunks, self.num_ranks))

    def rows_received(self, chunk: int) -> range:
        """Rows, by their number in the whole model, that are new to chunk's rank when it runs the chunk."""
        if chunk == 0:
            return range(0)
        known = self.rows_after[chunk - self.num_ranks] if chunk >= self.num_ranks else 0
        return range(known, self.rows_after[chunk - 1])

    def tensors_per_boundary(self, *, cached: bool = True) -> list[int]:
        """(T, D) tensors that travel forward over each boundary: rows, and the running sum."""
        return [rows + 1 for rows in rows_sent(self.rows_after, self.num_ranks, cached=cached)]

    def __str__(self) -> str:
        return " | ".join(f"{chunk % self.num_ranks}: {layers.start}–{layers.stop - 1}" for chunk, layers in enumerate(self.layers))


def layer_costs(config: ModelConfig, seq_len: int = 8192) -> tuple[list[float], float, float]:
    """Multiply-adds per token of every layer, of the embedding (none) and of head, loss and MTP.

    Attention scores count at half of `seq_len`, the causal average. Routed experts count as they are used, top_k of them.
    """
    D, kda, mla, moe = config.d_model, config.kda, config.mla, config.moe

    def attention(full: bool) -> float:
        if not full:
            gate = D * kda.width if kda.output_gate.name == "full" else (D + kda.width) * kda.head_dim
            state = 4 * kda.width * kda.head_dim
            return 4 * D * kda.width + (D + kda.width) * kda.head_dim + D * kda.num_heads + gate + state
        heads = mla.num_heads
        query = D * heads * mla.qk_head_dim if mla.q_lora_rank is None else mla.q_lora_rank * (D + heads * mla.qk_head_dim)
        latent = D * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        out = (1 + mla.output_gate) * D * heads * mla.v_head_dim
        return query + latent + out + heads * (mla.qk_head_dim + mla.v_head_dim) * seq_len / 2

    def ffn(sparse: bool) -> float:
        if not sparse:
            return 3 * D * config.ffn.dense_size
        width = D if moe.latent is None else moe.latent
        latent = 0 if moe.latent is None else 2 * D * moe.latent
        return D * moe.num_experts + latent + moe.top_k * 3 * width * moe.expert_size + 3 * D * moe.shared_size

    layers = [attention(config.is_full_attn(n)) + ffn(config.is_moe(n)) for n in range(config.num_layers)]
    head = D * config.vocab_size
    if config.mtp.num_layers:
        head += D * config.vocab_size + 2 * D * D + attention(True) + ffn(moe.first_dense_layers < config.num_layers)
    return layers, 0.0, float(head)


def plan_stages(config: ModelConfig, parallel: ParallelConfig, seq_len: int = 8192) -> StagePlan:
    """Cut the layers: as `parallel.stage_layers` says, else balanced by `layer_costs`.

    Raises:
        UserError: more chunks than layers, or a list that does not fit.
    """
    num_chunks = parallel.pp * parallel.vpp
    given: Sequence[int] = parallel.stage_layers
    if given:
        check(len(given) == num_chunks, "parallel.stage_layers", list(given), f"needs one number for each of the pp·vpp = {num_chunks} chunks")
        check(min(given) >= 1 and sum(given) == config.num_layers, "parallel.stage_layers", list(given),
              f"must be positive and sum to model.num_layers={config.num_layers}, not {sum(given)}")
        sizes = list(given)
    else:
        layers, first, last = layer_costs(config, seq_len)
        sizes = split_layers(layers, num_chunks, first=first, last=last)
    borders = [sum(sizes[:c]) for c in range(num_chunks + 1)]
    ranges = tuple(range(a, b) for a, b in zip(borders, borders[1:]))
    return StagePlan(ranges, tuple(config.bank_rows_before(b) for b in borders[1:]), parallel.pp)


def check_layout(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse a model that the layout cannot cut.

    Raises:
        UserError: the axis, and the sizes that would work.
    """
    tp = parallel.tp
    check_divides(tp, "model.kda.num_heads", config.kda.num_heads)
    check_divides(tp, "model.mla.num_heads", config.mla.num_heads)
    check_divides(tp, "model.vocab_size", config.vocab_size)
    check_divides(tp, "model.ffn.dense_size", config.ffn.dense_size)
    if config.moe.first_dense_layers < config.num_layers:
        if config.moe.num_shared_experts:
            check_divides(tp, "the shared experts' width", config.moe.shared_size)
        divisors = [d for d in range(1, config.moe.num_experts + 1) if config.moe.num_experts % d == 0]
        check(config.moe.num_experts % parallel.ep == 0, "parallel.ep", parallel.ep, f"must divide model.moe.num_experts={config.moe.num_experts}; choose one of {divisors}")
    check(parallel.pp * parallel.vpp <= config.num_layers, "parallel.pp·vpp", parallel.pp * parallel.vpp,
          f"the model has {config.num_layers} layers, and every chunk needs one; use at most {config.num_layers}")
    plan_stages(config, parallel)


def build_stage(config: ModelConfig, parallel: ParallelConfig, mesh: Mesh, *, device: torch.device | str = "meta", recompute: str = "none") -> Transformer:
    """This rank's part of the model with every parameter's record in place.

    The whole model is never allocated. Parameters are empty: fill them with `init_parameters` (the values do not depend
    on the layout) or from a checkpoint.

    Raises:
        UserError: see `check_layout`.
    """
    check_layout(config, parallel)
    plan = plan_stages(config, parallel)
    first, last = mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
    layers = [n for chunk in plan.chunks_of(mesh.pp.rank) for n in plan.layers[chunk]]
    with torch.device("meta"):
        stage = Transformer(config, recompute=recompute, layers=layers, embed=first, head=last)
        whole = {path: p.megamoe for path, p in stage.named_parameters()}
        for path, module in list(stage.named_modules()):
            swap = _parallel_class(module, config, mesh) if path != "lm_head" else Linear(config.d_model, config.vocab_size // mesh.tp.size)
            if swap is not None:
                parent, _, name = path.rpartition(".")
                setattr(stage.get_submodule(parent), name, swap)
        if mesh.tp.group is not None:
            stage.loss_op = VocabParallelLoss(mesh.tp)
    annotate(stage)
    shared_embedding = mesh.pp.size > 1 and bool(config.tie_embeddings or config.mtp.num_layers)
    for path, p in stage.named_parameters():
        p.megamoe = _localise(p, whole[path], mesh, shared_embedding)
    records = {path: p.megamoe for path, p in stage.named_parameters()}
    stage.to_empty(device=device)
    # Leaving the meta device makes new parameter objects.
    for path, p in stage.named_parameters():
        p.megamoe = records[path]
    return stage


def _parallel_class(module: nn.Module, config: ModelConfig, mesh: Mesh) -> nn.Module | None:
    """The module that stands in for a plain one on this layout, or None."""
    tp, D = mesh.tp, config.d_model
    sharded = None
    if type(module) is KDA:
        sharded = ParallelKDA(D, replace(config.kda, num_heads=config.kda.num_heads // tp.size))
    elif type(module) is MLA:
        sharded = ParallelMLA(D, replace(config.mla, num_heads=config.mla.num_heads // tp.size))
    elif type(module) is GatedMLP:
        sharded = ParallelMLP(D, module.gate_proj.weight.shape[0] // tp.size, config.ffn)
    elif type(module) is Embedding:
        sharded = VocabParallelEmbedding(config.vocab_size // tp.size, D)
    elif type(module) is MoE:
        here = config.moe.num_experts // mesh.ep.size
        moe = MoE(D, config.norm_eps, config.moe, config.ffn, group=mesh.ep.group, first_expert=mesh.ep.rank * here, num_local=here)
        if config.moe.num_shared_experts:
            moe.shared_experts = _parallel_class(moe.shared_experts, config, mesh)
        return moe
    if sharded is not None:
        sharded.tp = tp
    return sharded


def _localise(p: nn.Parameter, whole: ParamInfo, mesh: Mesh, shared_embedding: bool) -> ParamInfo:
    """The record of a parameter that may have been cut: where it starts, and who sums its gradient with whom."""
    info: ParamInfo = p.megamoe
    if info.is_expert:
        return replace(info, tp_replicated=False, reduce_axis="edp")
    cut = [d for d, (here, everywhere) in enumerate(zip(p.shape, whole.global_shape)) if here != everywhere]
    assert len(cut) <= 1, f"{info.name}: {tuple(p.shape)} of {whole.global_shape} is cut along more than one dim"
    offset = [0] * p.dim()
    for d in cut:
        assert p.shape[d] * mesh.tp.size == whole.global_shape[d], f"{info.name}: {tuple(p.shape)} of {whole.global_shape} is not 1/tp"
        offset[d] = mesh.tp.rank * p.shape[d]
    axis = "dp_cp" if cut else "stage"
    if shared_embedding and info.name == EMBEDDING:
        axis = "ends"
    return replace(info, global_shape=whole.global_shape, offset=tuple(offset), tp_replicated=not cut, reduce_axis=axis)


def describe(stage: nn.Module) -> str:
    """One line per parameter: logical name, local shape, place in the whole, axis of its gradient's sum."""
    rows = []
    for _, p in stage.named_parameters():
        i: ParamInfo = p.megamoe
        rows.append(f"{i.name:64s} {str(tuple(p.shape)):22s} of {str(i.global_shape):22s} at {str(i.offset):16s} sum over {i.reduce_axis}")
    return "\n".join(rows)
