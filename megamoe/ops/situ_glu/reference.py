"""SiTU-GLU and SwiGLU with hand-written gradients, so that only gate and up are kept for backward.

    situ   f = a tanh(g/a) s * b tanh(u/b),  s = sigmoid(g)
           df/dg = [ (1 - tanh^2(g/a)) s + a tanh(g/a) s (1 - s) ] * b tanh(u/b)
           df/du = a tanh(g/a) s (1 - tanh^2(u/b))
    silu   f = g s u;  df/dg = s (1 + g (1 - s)) u;  df/du = g s
"""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide


def gated_activation(gate, up, *, act, beta=4.0, linear_beta=25.0):
    """See the contract in `megamoe.ops.situ_glu`."""
    if act == "situ":
        return _SiTU.apply(gate, up, beta, linear_beta)
    return _SwiGLU.apply(gate, up)


def situ_fwd(g, u, beta, linear_beta):
    """Value for inputs already in the wide dtype; also used by fused twins."""
    return (g / beta).tanh_().mul_(torch.sigmoid(g)).mul_((u / linear_beta).tanh_()).mul_(beta * linear_beta)


def situ_bwd(g, u, dout, beta, linear_beta):
    """(dg, du) for inputs already in the wide dtype."""
    tg, tu, s = (g / beta).tanh_(), (u / linear_beta).tanh_(), torch.sigmoid(g)
    left = tg * s
    # s (1 - tg^2 + beta tg (1 - s)), then times the other branch; in place, each line is one pass over memory.
    slope = torch.addcmul(tg.mul(beta).add_(1), tg, tg, value=-1).sub_(left, alpha=beta).mul_(s)
    dg = slope.mul_(tu).mul_(dout).mul_(linear_beta)
    du = tu.square_().neg_().add_(1).mul_(left).mul_(dout).mul_(beta)
    return dg, du


class _SiTU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.bounds = (beta, linear_beta)
        dtype = wide(gate.dtype)
        return situ_fwd(gate.to(dtype), up.to(dtype), beta, linear_beta).to(gate.dtype)

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        dtype = wide(gate.dtype)
        dg, du = situ_bwd(gate.to(dtype), up.to(dtype), dout.to(dtype), *ctx.bounds)
        return dg.to(gate.dtype), du.to(up.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        g, u = gate.to(wide(gate.dtype)), up.to(wide(gate.dtype))
        return (g * torch.sigmoid(g) * u).to(gate.dtype)

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        dtype = wide(gate.dtype)
        g, u, dout = gate.to(dtype), up.to(dtype), dout.to(dtype)
        s = torch.sigmoid(g)
        return (s * (1 + g * (1 - s)) * u * dout).to(gate.dtype), (g * s * dout).to(up.dtype)
