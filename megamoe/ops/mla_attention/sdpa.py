"""Document by document through torch's scaled_dot_product_attention, which never writes the scores out.

Equal neighbours (a plain batch) go in one call. The values are padded to the keys' width: the fused kernels, CPU's
among them, take one width only, and the padding costs less than writing scores.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from megamoe.ops.precision import wide


def mla_attention(q_THQ, k_THQ, v_THV, *, cu_seqlens, scale, max_seqlen=None):
    """See the contract in `megamoe.ops.mla_attention`. On a GPU the kernel rounds its output to the inputs' dtype."""
    V = v_THV.shape[-1]
    runs = [(length, len(list(run))) for length, run in groupby(n for n in cu_seqlens.diff().tolist() if n)]
    sizes = [length * count for length, count in runs]
    v_THQ = F.pad(v_THV, (0, q_THQ.shape[-1] - V)) if V < q_THQ.shape[-1] else v_THV
    outs = [v_THV.new_zeros(0, *v_THV.shape[1:])]
    for (length, _), q, k, v in zip(runs, q_THQ.split(sizes), k_THQ.split(sizes), v_THQ.split(sizes)):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        o_nHtV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outs.append(o_nHtV[..., :V].transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).to(wide(q_THQ.dtype))
