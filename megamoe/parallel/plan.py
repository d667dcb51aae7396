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

from dataclasses import replace

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
from megamoe.parallel.stages import check_layout, plan_stages
from megamoe.parallel.tensor import ParallelMLP, SequenceShards, VocabParallelEmbedding, VocabParallelLoss

EMBEDDING = "model.embed_tokens.weight"


class ParallelKDA(SequenceShards, ContextKDA):
    """KDA with 1/tp of the heads on a cp slice."""


class ParallelMLA(SequenceShards, ContextMLA):
    """MLA with 1/tp of the heads on a cp slice."""


def build_stage(config: ModelConfig, parallel: ParallelConfig, mesh: Mesh, *, device: torch.device | str = "meta", seq_len: int = 8192, recompute: str = "none") -> Transformer:
    """This rank's part of the model with every parameter's record in place.

    The whole model is never allocated. Parameters are empty: fill them with `init_parameters` (the values do not depend
    on the layout) or from a checkpoint. `seq_len` weighs attention when stages are balanced.

    Raises:
        UserError: see `check_layout`.
    """
    check_layout(config, parallel)
    plan = plan_stages(config, parallel, seq_len)
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
