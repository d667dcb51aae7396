"""Experts by torch's grouped matrix product: counts stay on the device, no host sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.ops.mxfp4 import fake_quantize
from megamoe.ops.situ_glu.reference import gated_activation


def grouped_mlp(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, *, act, act_beta=4.0, act_linear_beta=25.0, mxfp8_hidden=False):
    """See the contract in `megamoe.ops.grouped_mlp`. bf16 on a GPU."""
    end_e = count_e.cumsum(0, dtype=torch.int32)
    # grouped_mm leaves rows past the last end unwritten, forward and backward. Cut them to zero on both sides, by
    # where and not by a product: unwritten memory may hold NaN.
    inside_R1 = (torch.arange(rows_RD.shape[0], device=rows_RD.device) < end_e[-1])[:, None]
    rows_RD = torch.where(inside_R1, rows_RD, 0)
    gate = F.grouped_mm(rows_RD, w_gate_eFD.transpose(1, 2), offs=end_e)
    up = F.grouped_mm(rows_RD, w_up_eFD.transpose(1, 2), offs=end_e)
    hidden = gated_activation(gate, up, act=act, beta=act_beta, linear_beta=act_linear_beta)
    if mxfp8_hidden:
        hidden = fake_quantize(hidden, "mxfp8")
    out = F.grouped_mm(hidden, w_down_eDF.transpose(1, 2), offs=end_e)
    return torch.where(inside_R1, out, 0)
