"""Tensor parallelism with sequence shards: layers with fewer heads between a gather and a scatter.

Between sublayers every tp rank holds its own shard of the tokens. A sublayer that is cut over tp gathers them, computes
with its own heads (or hidden columns), and scatters the sum of all ranks' partial results back into shards:

    x_shard → all_gather → [ the plain layer, 1/tp of its heads ] → reduce_scatter → y_shard

So the layer inside is the single-device class itself, built for fewer heads. Its first matrices are cut by output
columns, its last one by input columns, and what all heads share (latent projections, low-rank factors, `o_norm`) is
held by every rank: each computes its own heads' part of that gradient, and the parts are summed over the stage, exactly
as for norms and router, where the parts come from different tokens. One rule for both: `ParamInfo.reduce_axis`.

Letters: T tokens of the cp slice, t = T/tp tokens of the shard, V vocabulary of all ranks, v of this one.
Source: arXiv:1909.08053 (cuts), arXiv:2205.05198 (sequence shards); code ours.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from megamoe.layers.basic import Embedding
from megamoe.layers.ffn import GatedMLP
from megamoe.ops.collectives import all_gather, reduce_scatter
from megamoe.ops.linear_cross_entropy import CHUNK_LOGITS, IGNORE_LABEL
from megamoe.ops.linear_cross_entropy.chunked import _product
from megamoe.ops.precision import wide
from megamoe.parallel.mesh import Axis
from megamoe.utils.torch_compat import all_gather_single


class SequenceShards:
    """Mixin in front of a layer class: gather tokens, run the layer, scatter the sum. `tp` is set by `plan.py`.

    Collective over tp: one all_gather and one reduce_scatter, forward and backward each.
    """

    tp: Axis = Axis()

    def forward(self, x_tD: torch.Tensor, *args, **kwargs):
        out = super().forward(all_gather(x_tD, self.tp.group), *args, **kwargs)
        if isinstance(out, tuple):
            return reduce_scatter(out[0], self.tp.group), *out[1:]
        return reduce_scatter(out, self.tp.group)


class ParallelMLP(SequenceShards, GatedMLP):
    """Dense FFN or shared experts with 1/tp of the hidden width."""


class VocabParallelEmbedding(Embedding):
    """Rows [first, first + v) of the embedding. tokens_T of the cp slice in, (t, D) of this rank's shard out.

    A token's row is on one rank; the others contribute zeros to the scattered sum.
    """

    tp: Axis = Axis()

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self.tp.group is None:
            return super().forward(tokens_T)
        rows = self.weight.shape[0]
        local_T = tokens_T - self.tp.rank * rows
        here_T = (local_T >= 0) & (local_T < rows)
        x_TD = F.embedding(torch.where(here_T, local_T, 0), self.weight) * here_T[:, None]
        return reduce_scatter(x_TD, self.tp.group)


class VocabParallelLoss:
    """`linear_cross_entropy` with the head cut by vocabulary rows; hidden states come as shards.

    loss = op(h_tD, weight_vD, labels_T): (T,) of the whole cp slice, the same on every tp rank.

    Logits exist for a slice of tokens and this rank's rows at a time. Ranks exchange two numbers per token, their
    logsumexp and the label's logit (zero where the label is another rank's). Collective over tp.
    """

    def __init__(self, tp: Axis):
        self.tp = tp

    def on(self, h_tD: torch.Tensor) -> VocabParallelLoss:
        """As the registry's call sites have it; there is one backend."""
        return self

    def __call__(self, h_tD: torch.Tensor, weight_vD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        return _VocabParallelLoss.apply(all_gather(h_tD, self.tp.group), weight_vD, labels_T, self.tp)


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, weight_vD, labels_T, tp):
        rows = weight_vD.shape[0]
        chunk = max(1, CHUNK_LOGITS.get(h_TD.device.type, CHUNK_LOGITS["cuda"]) // rows)
        local_T = labels_T - tp.rank * rows
        here_T = (local_T >= 0) & (local_T < rows) & (labels_T != IGNORE_LABEL)
        local_T = torch.where(here_T, local_T, 0)
        lse, picked = [], []
        for h, label in zip(h_TD.split(chunk), local_T.split(chunk)):
            logits = _product(h, weight_vD.t())
            lse.append(logits.logsumexp(-1))
            picked.append(logits.gather(1, label[:, None])[:, 0])
        mine_2T = torch.stack([torch.cat(lse), torch.cat(picked) * here_T])
        all_r2T = mine_2T.new_empty(tp.size, *mine_2T.shape)
        all_gather_single(all_r2T.flatten(0, 1), mine_2T, group=tp.group)
        lse_T = all_r2T[:, 0].logsumexp(0)
        ctx.save_for_backward(h_TD, weight_vD, local_T, here_T, lse_T, labels_T)
        ctx.chunk = chunk
        return torch.where(labels_T == IGNORE_LABEL, 0, lse_T - all_r2T[:, 1].sum(0))

    @staticmethod
    def backward(ctx, dloss_T):
        h_TD, weight_vD, local_T, here_T, lse_T, labels_T = ctx.saved_tensors
        dloss_T = torch.where(labels_T == IGNORE_LABEL, 0, dloss_T)
        dW_vD = torch.zeros_like(weight_vD, dtype=wide(weight_vD.dtype))
        dh = []
        for h, label, here, lse, dloss in zip(*(x.split(ctx.chunk) for x in (h_TD, local_T, here_T, lse_T, dloss_T))):
            # d logits = (softmax - onehot) * dloss, the one only where the label's row is this rank's.
            dlogits = _product(h, weight_vD.t()).sub_(lse[:, None]).exp_()
            dlogits.scatter_add_(1, label[:, None], -here.to(dlogits.dtype)[:, None])
            dlogits = dlogits.mul_(dloss[:, None]).to(h.dtype)
            # Partial sums over vocabulary rows: the gather in front of this function adds them up over tp.
            dh.append(dlogits @ weight_vD)
            dW_vD += _product(dlogits.t(), h)
        return torch.cat(dh), dW_vD.to(weight_vD.dtype), None, None
