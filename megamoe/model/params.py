"""What each parameter is, written on the parameter: `p.megamoe`.

Gradient norm, reduction, optimizer grouping, checkpoints and conversion read these facts and nothing else, so a new
kind of parameter is described once, here. Splitting code (`parallel/`) replaces the record of what it cuts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import nn

from megamoe.layers.attn_res import AttnRes
from megamoe.layers.basic import Embedding, GatedRMSNorm, Linear, RMSNorm, ShortConv
from megamoe.layers.kda import KDA
from megamoe.layers.mla import MLA
from megamoe.layers.moe import Experts, MoE
from megamoe.layers.router import Router

MUON = "muon"
ADAMW = "adamw"


@dataclass(frozen=True)
class ParamInfo:
    """One parameter's place in the whole model.

    Attributes:
        name: logical name, the released one where the release has the tensor; the same on every layout.
        global_shape: of the whole tensor over all ranks.
        offset: where the local tensor starts in it, one number per dim.
        expert_ids: global ids of the experts along dim 0 of a routed-expert stack, else None.
        tp_replicated: whether all tensor-parallel ranks hold the same values; `parallel/` says no for what it cuts.
        optimizer: `muon` for matrices that map one hidden space to another; `adamw` for the rest (see `annotate`).
        muon_blocks: None orthogonalises the matrix (each expert's matrix) whole; ("heads", rows) splits it into blocks
            of so many rows, one after the other.
        weight_decay: whether decay applies.
        keep_wide: stays in fp32 when the model is cast to bf16.
        reduce_axis: the mesh axis over which gradients are summed: its ranks hold this same slice and a part of the sum
            each. All ranks of the pipeline stage for what every one of them holds; `parallel/plan.py` says otherwise.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    expert_ids: tuple[int, ...] | None = None
    tp_replicated: bool = True
    optimizer: str = ADAMW
    muon_blocks: tuple[str, int] | None = None
    weight_decay: bool = False
    keep_wide: bool = False
    reduce_axis: str = "stage"

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to routed experts: reduced over edp, not over dp."""
        return self.expert_ids is not None

    def muon_view(self, p: torch.Tensor) -> tuple[int, int, int]:
        """(count, rows, cols): the matrices that Muon orthogonalises one by one, as a view of the local tensor."""
        if self.is_expert:
            return tuple(p.shape)
        rows = p.shape[0] if self.muon_blocks is None else self.muon_blocks[1]
        if p.dim() != 2 or p.shape[0] % rows:
            raise ValueError(f"{self.name}: shape {tuple(p.shape)} does not fall into blocks of {rows} rows; cut it at head borders")
        return p.shape[0] // rows, rows, p.shape[1]


def annotate(model: nn.Module) -> None:
    """Give every parameter its `ParamInfo`, from the module that owns it.

    Muon orthogonalises an update, which means something for a matrix whose rows and columns are both hidden features.
    So AdamW takes: embedding and head (rows are tokens, most of them absent from a batch), norms, biases and decay
    parameters (vectors), convolutions (4 taps per channel), AttnRes queries (one row each) and the router (its rows
    compete for tokens; equalising them would fight the balancing rule).

    Decay applies to matrices, not to vectors: shrinking a norm weight or a decay rate regularises nothing.

    Raises:
        AssertionError: a parameter that no rule describes.
    """
    for module_name, module in model.named_modules():
        for p_name, p in module.named_parameters(recurse=False):
            path = f"{module_name}.{p_name}" if module_name else p_name
            info = ParamInfo(logical_name(path), tuple(p.shape), (0,) * p.dim())
            p.megamoe = _describe(module, p_name, info, model)
    for module in model.modules():
        if isinstance(module, (KDA, MLA)):
            _mark_head_blocks(module)
        if isinstance(module, AttnRes):
            module.proj.weight.megamoe = replace(module.proj.weight.megamoe, optimizer=ADAMW, weight_decay=False)
        if isinstance(module, MoE):
            _mark_experts(module)
    if getattr(model, "lm_head", None) is not None:
        model.lm_head.weight.megamoe = replace(model.lm_head.weight.megamoe, optimizer=ADAMW)


def _describe(module: nn.Module, p_name: str, info: ParamInfo, model: nn.Module) -> ParamInfo:
    if isinstance(module, Linear):
        return replace(info, optimizer=MUON, weight_decay=True)
    if isinstance(module, Experts):
        return replace(info, optimizer=MUON, weight_decay=True)
    if isinstance(module, (Embedding, Router)):
        return replace(info, weight_decay=True)
    if isinstance(module, (GatedRMSNorm, ShortConv, KDA)):
        return replace(info, keep_wide=True)
    assert isinstance(module, RMSNorm), f"{info.name}: no rule describes a parameter of {type(module).__name__}"
    return info


def _mark_head_blocks(attention: nn.Module) -> None:
    """Momentum of Q, K and V is orthogonalised head by head; every other attention matrix whole."""
    c = attention.config
    if isinstance(attention, KDA):
        rows = {"q_proj": c.head_dim, "k_proj": c.head_dim, "v_proj": c.head_dim}
    else:
        query = "q_proj" if c.q_lora_rank is None else "q_b_proj"
        # Rows of kv_b per head: keys, then values. Of one width they are blocks of their own; else the head is one block.
        same = c.qk_nope_head_dim == c.v_head_dim
        rows = {query: c.qk_head_dim, "kv_b_proj": c.v_head_dim if same else c.qk_nope_head_dim + c.v_head_dim}
    for name, height in rows.items():
        weight = getattr(attention, name).weight
        weight.megamoe = replace(weight.megamoe, muon_blocks=("heads", height))


def _mark_experts(moe: MoE) -> None:
    ids = tuple(range(moe.first_expert, moe.first_expert + moe.num_local))
    for p in moe.experts.parameters():
        shape = (moe.config.num_experts, *p.shape[1:])
        p.megamoe = replace(p.megamoe, expert_ids=ids, global_shape=shape, offset=(moe.first_expert, 0, 0))


def logical_name(path: str) -> str:
    """Module path -> logical name.

    The release's names, without its outer prefix: `model.` in front of all but the head, and AttnRes modules as
    `<place>_norm`, `<place>_proj`. Routed experts are stacks here: `….experts.w1` with the expert as dim 0.
    """
    path = re.sub(r"(\w+_res)\.(norm|proj)\.", r"\1_\2.", path)
    return path if path.startswith("lm_head.") else f"model.{path}"
