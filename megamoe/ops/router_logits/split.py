"""fp32 products on bf16 tensor cores, by exact pieces.

A bf16 number times a bf16 number is exact in fp32, so a bf16 input needs one product, and an fp32 operand becomes three bf16
pieces that add up to it (8 + 8 + 8 bits of significand): x W^T = x (W1 + W2 + W3)^T. What remains is the rounding of the sums
in fp32. Tensor cores truncate when they add, so the error of one long sum grows with its length (7.9e-6 at D = 7168); D is cut
into pieces of 448, whose products are added with rounding: 4.2e-7 in 0.68 ms, against 2.4e-7 in 2.27 ms of the fp32 product.
Gradients are not cut: bf16 ones round far above that, an fp32 weight's is good to about 1e-5. Source: the splitting is folklore
(Ozaki schemes); figures: csrc/NOTES_MOE.md.
"""

from __future__ import annotations

import torch

# Columns summed inside one product.
PIECE = 448


def why_not(*, device="cuda", dtype=torch.bfloat16, D=8, E=8, **_) -> str | None:
    """Why this cannot serve a call site, in words, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "tensors are not on a GPU" if device != "cuda" else "no CUDA device here"
    if dtype != torch.bfloat16:
        return f"takes bf16 inputs, whose products are exact, not {dtype}"
    if D % 8 or E % 8:
        return f"widths must be multiples of 8, got {D} and {E}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def load():
    """The callable."""
    return router_logits


def router_logits(x_ND, weight_ED):
    """See the contract in `megamoe.ops.router_logits`. bf16 x; the weight in bf16 or fp32."""
    return _Product.apply(x_ND, weight_ED)


def pieces(x: torch.Tensor) -> list[torch.Tensor]:
    """bf16 tensors that add up to x: one for bf16, three for fp32 (exact but for numbers below 2^-110 of the largest)."""
    if x.dtype == torch.bfloat16:
        return [x]
    out, rest = [], x.float()
    for _ in range(3):
        out.append(rest.bfloat16())
        rest = rest - out[-1].float()
    return out


def product(a_pieces, b_pieces, cut: int | None = None) -> torch.Tensor:
    """sum over pieces of a b in fp32: a (M, K), b (K, N). `cut`: columns of K per product. Smallest pieces first."""
    total = None
    K = a_pieces[0].shape[1]
    cut = cut or K
    for a in reversed(a_pieces):
        for b in reversed(b_pieces):
            for k in range(0, K, cut):
                part = _mm(a[:, k : k + cut], b[k : k + cut])
                total = part if total is None else total.add_(part)
    return total


def _mm(a, b):
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # for tests of the splitting


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_ED):
        ctx.save_for_backward(x_ND, weight_ED)
        return product([x_ND], [w.t() for w in pieces(weight_ED)], PIECE)

    @staticmethod
    def backward(ctx, dlogits_NE):
        x_ND, weight_ED = ctx.saved_tensors
        d = pieces(dlogits_NE)
        dx = product(d, pieces(weight_ED)).to(x_ND.dtype) if ctx.needs_input_grad[0] else None
        dw = product([p.t() for p in d], [x_ND]).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw
