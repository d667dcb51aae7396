"""The convolution as W shifted multiply-adds; only the raw input is kept for backward.

A tap j reads x[t-j] when t-j lies in t's document, i.e. when t's position p in the document is at least j. The few
tokens with p < j read the history instead: those terms are gathered and added apart, so that the common case without
history costs nothing.
"""

from __future__ import annotations

import torch

from megamoe.ops.packing import document_positions
from megamoe.ops.precision import wide


def short_conv(x_TC, weight_C1W, *, cu_seqlens, history_NWC=None, output_final_history=False):
    """See the contract in `megamoe.ops.short_conv`."""
    position_T = document_positions(cu_seqlens, x_TC.shape[0])
    from_history = None
    if history_NWC is not None:
        from_history = _history_terms(x_TC.shape[0], weight_C1W, cu_seqlens, history_NWC)
    y_TC = _ConvSiLU.apply(x_TC, weight_C1W, position_T, from_history)
    final = _final_history(x_TC, weight_C1W.shape[-1], cu_seqlens, history_NWC) if output_final_history else None
    return y_TC, final


class _ConvSiLU(torch.autograd.Function):
    """SiLU(conv(x) + extra). Keeps x, recomputes the convolution in backward."""

    @staticmethod
    def forward(ctx, x_TC, weight_C1W, position_T, extra_TC):
        ctx.save_for_backward(x_TC, weight_C1W, position_T, extra_TC)
        z = _convolve(x_TC, weight_C1W, position_T, extra_TC)
        return (z * torch.sigmoid(z)).to(x_TC.dtype)

    @staticmethod
    def backward(ctx, dy_TC):
        x_TC, weight_C1W, position_T, extra_TC = ctx.saved_tensors
        z = _convolve(x_TC, weight_C1W, position_T, extra_TC)
        s = torch.sigmoid(z)
        dz = dy_TC.to(z.dtype) * s * (1 + z * (1 - s))
        x, w_CW = x_TC.to(z.dtype), weight_C1W.to(z.dtype).squeeze(1)
        W = w_CW.shape[-1]
        dx = dz * w_CW[:, W - 1]
        dw = [(dz * x).sum(0)]
        for j in range(1, min(W, x.shape[0])):
            inside = dz[j:] * (position_T[j:] >= j).to(dz.dtype)[:, None]
            dx[:-j].addcmul_(inside, w_CW[:, W - 1 - j])
            dw.append((inside * x[:-j]).sum(0))
        dw += [torch.zeros_like(dw[0])] * (W - len(dw))
        dw_C1W = torch.stack(dw[::-1], -1).unsqueeze(1).to(weight_C1W.dtype)
        return dx.to(x_TC.dtype), dw_C1W, None, None if extra_TC is None else dz


def _convolve(x_TC, weight_C1W, position_T, extra_TC):
    dtype = wide(x_TC.dtype)
    x, w_CW = x_TC.to(dtype), weight_C1W.to(dtype).squeeze(1)
    W = w_CW.shape[-1]
    z = x * w_CW[:, W - 1]
    for j in range(1, min(W, x.shape[0])):
        z[j:].addcmul_(x[:-j] * (position_T[j:] >= j).to(dtype)[:, None], w_CW[:, W - 1 - j])
    return z if extra_TC is None else z + extra_TC


def _history_terms(T, weight_C1W, cu_seqlens, history_NWC):
    """What the history adds to the first W-1 tokens of each document, as a (T, C) tensor in the wide dtype.

    Token p of a document reads history row W-1+p-j through tap j > p.
    """
    dtype = wide(history_NWC.dtype)
    history, w_CW = history_NWC.to(dtype), weight_C1W.to(dtype).squeeze(1)
    W = w_CW.shape[-1]
    out_TC = history.new_zeros(T, history.shape[-1])
    if T == 0:
        return out_TC
    start_N, end_N = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    for p in range(W - 1):
        term_NC = sum(history[:, W - 1 + p - j] * w_CW[:, W - 1 - j] for j in range(p + 1, W))
        inside_N = start_N + p < end_N
        # A document too short for row p adds zero to token 0 instead of being filtered out: filtering would sync the host.
        token_N = torch.where(inside_N, start_N + p, 0)
        out_TC = out_TC.index_add(0, token_N, term_NC * inside_N[:, None].to(dtype))
    return out_TC


def _final_history(x_TC, W, cu_seqlens, history_NWC):
    """(n, W-1, C): the last W-1 inputs of each document; where it is shorter, the tail of its own history."""
    T, C = x_TC.shape
    start_N, end_N = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    N = start_N.shape[0]
    if history_NWC is None:
        history_NWC = x_TC.new_zeros(N, W - 1, C)
    source = torch.cat([x_TC, history_NWC.to(x_TC.dtype).reshape(-1, C)])
    back_W = torch.arange(W - 1, 0, -1, device=x_TC.device)  # W-1, …, 1 tokens before the end
    token_NW = end_N[:, None] - back_W
    missing_NW = start_N[:, None] - token_NW  # > 0: that many rows before the document's start
    first_row_N = T + torch.arange(N, device=x_TC.device) * (W - 1)
    index_NW = torch.where(missing_NW > 0, first_row_N[:, None] + (W - 1) - missing_NW, token_NW)
    return source[index_NW]
