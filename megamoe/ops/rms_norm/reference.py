"""Plain RMSNorm, plain and gated, with hand-written backward so that only the inputs are kept.

Autograd would keep four fp32 copies of the activation for each norm; the backward here rebuilds them from x.
With y = x r, r = rsqrt(mean(x^2) + eps) and upstream dn on the normalised value: dx = r (dn - y mean(dn y)).
"""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide


def rms_norm(x, weight_D, *, eps):
    """See the contract in `megamoe.ops.rms_norm`."""
    return _RMSNorm.apply(x, weight_D, eps)


def gated_rms_norm(x, weight_D, gate, *, eps):
    """See the contract in `megamoe.ops.rms_norm`."""
    return _GatedRMSNorm.apply(x, weight_D, gate, eps)


def _normalise(x, eps):
    """(x in the wide dtype times r, r): the pair that forward and backward share."""
    x = x.to(wide(x.dtype))
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * r, r


def _normalise_bwd(y, r, dn):
    return (dn - y * (dn * y).mean(-1, keepdim=True)) * r


def _sum_rows(x, like):
    return x.reshape(-1, x.shape[-1]).sum(0).to(like.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps):
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        y, _ = _normalise(x, eps)
        return y.to(x.dtype) * weight_D.to(x.dtype)

    @staticmethod
    def backward(ctx, dout):
        x, weight_D = ctx.saved_tensors
        y, r = _normalise(x, ctx.eps)
        dout = dout.to(y.dtype)
        dx = _normalise_bwd(y, r, dout * weight_D.to(y.dtype)).to(x.dtype)
        return dx, _sum_rows(dout * y, weight_D), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, gate, eps):
        ctx.save_for_backward(x, weight_D, gate)
        ctx.eps = eps
        y, _ = _normalise(x, eps)
        return (y * weight_D.to(y.dtype) * torch.sigmoid(gate.to(y.dtype))).to(gate.dtype)

    @staticmethod
    def backward(ctx, dout):
        x, weight_D, gate = ctx.saved_tensors
        y, r = _normalise(x, ctx.eps)
        s = torch.sigmoid(gate.to(y.dtype))
        weight = weight_D.to(y.dtype)
        dout = dout.to(y.dtype)
        dgated = dout * s
        dx = _normalise_bwd(y, r, dgated * weight).to(x.dtype)
        dgate = (dout * y * weight * s * (1 - s)).to(gate.dtype)
        return dx, _sum_rows(dgated * y, weight_D), dgate, None
