"""Document by document through torch's scaled_dot_product_attention, which never writes the scores out.

Equal neighbours (a plain batch) go in one call. The values are padded to the keys' width: the fused kernels, CPU's
among them, take one width only, and the padding costs less than writing scores.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from megamoe.ops.precision import wide


def mla_attention(q_THQ, k_THQ, v_THV, *, cu_seqlens, scale, max_seqlen=None, cu_seqlens_k=None):
    """See the contract in `megamoe.ops.mla_attention`. On a GPU the kernel rounds its output to the inputs' dtype."""
    V = v_THV.shape[-1]
    lengths = cu_seqlens.diff().tolist()
    key_lengths = lengths if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
    # Documents without queries may still have keys: they keep their place, so that the splits below stay aligned.
    runs = [(shape, len(list(run))) for shape, run in groupby(shape for shape in zip(lengths, key_lengths) if any(shape))]
    sizes = [queries * count for (queries, _), count in runs]
    key_sizes = [keys * count for (_, keys), count in runs]
    v_THQ = F.pad(v_THV, (0, q_THQ.shape[-1] - V)) if V < q_THQ.shape[-1] else v_THV
    outs = [v_THV.new_zeros(0, *v_THV.shape[1:])]
    for ((queries, keys), _), q, k, v in zip(runs, q_THQ.split(sizes), k_THQ.split(key_sizes), v_THQ.split(key_sizes)):
        if queries == 0:
            continue
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x, length in ((q, queries), (k, keys), (v, keys)))
        mask = None
        if queries < keys:
            # The queries are the document's last ones: query i sees keys up to keys - queries + i.
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        o_nHtV = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        outs.append(o_nHtV[..., :V].transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).to(wide(q_THQ.dtype))
