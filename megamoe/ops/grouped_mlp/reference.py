"""One expert after the other. Reads the counts on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.ops.mxfp4 import fake_quantize
from megamoe.ops.situ_glu.reference import gated_activation


def grouped_mlp(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, *, act, act_beta=4.0, act_linear_beta=25.0, mxfp8_hidden=False):
    """See the contract in `megamoe.ops.grouped_mlp`."""
    counts = count_e.tolist()
    rest = rows_RD.shape[0] - sum(counts)
    outs = []
    # unbind, not w[e]: the backward of e separate slices would fill e tensors of the whole stack's size.
    # Experts without rows run too, on zero rows: that is what makes their gradients exact zeros instead of missing.
    for rows, w_gate, w_up, w_down in zip(rows_RD.split([*counts, rest]), w_gate_eFD.unbind(), w_up_eFD.unbind(), w_down_eDF.unbind()):
        hidden = gated_activation(F.linear(rows, w_gate), F.linear(rows, w_up), act=act, beta=act_beta, linear_beta=act_linear_beta)
        outs.append(F.linear(fake_quantize(hidden, "mxfp8") if mxfp8_hidden else hidden, w_down))
    outs.append(rows_RD.new_zeros(rest, w_down_eDF.shape[1]))
    return torch.cat(outs)
