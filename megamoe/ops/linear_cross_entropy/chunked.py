"""Slices of tokens through head and loss; backward computes each slice's logits again.

Kept for backward: the inputs and one logsumexp per token. One extra head product is the price of never holding (T, V).
"""

from __future__ import annotations

import torch

from megamoe.ops.linear_cross_entropy import CHUNK_LOGITS, IGNORE_LABEL
from megamoe.ops.precision import wide


def linear_cross_entropy(h_TD, weight_VD, labels_T):
    """See the contract in `megamoe.ops.linear_cross_entropy`."""
    return _LinearCrossEntropy.apply(h_TD, weight_VD, labels_T)


def _product(a, b):
    """a @ b in the wide dtype. On a GPU bf16 operands go to the tensor cores and come out in fp32, unrounded."""
    dtype = wide(a.dtype)
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, weight_VD, labels_T):
        chunk = max(1, CHUNK_LOGITS.get(h_TD.device.type, CHUNK_LOGITS["cuda"]) // weight_VD.shape[0])
        loss, lse = [], []
        for h, labels in zip(h_TD.split(chunk), labels_T.split(chunk)):
            logits = _product(h, weight_VD.t())
            picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
            top = logits.amax(-1)
            lse.append(logits.sub_(top[:, None]).exp_().sum(-1).log_() + top)  # in place: torch.logsumexp would take two more slices
            loss.append(torch.where(labels == IGNORE_LABEL, 0, lse[-1] - picked))
        lse_T = torch.cat(lse)
        ctx.save_for_backward(h_TD, weight_VD, labels_T, lse_T)
        ctx.chunk = chunk
        return torch.cat(loss)

    @staticmethod
    def backward(ctx, dloss_T):
        h_TD, weight_VD, labels_T, lse_T = ctx.saved_tensors
        dW_VD = torch.zeros_like(weight_VD, dtype=wide(weight_VD.dtype)) if ctx.needs_input_grad[1] else None
        dh = []
        for h, labels, lse, dloss in zip(*(x.split(ctx.chunk) for x in (h_TD, labels_T, lse_T, dloss_T))):
            # d logits = (softmax - onehot) * dloss, built in place in the slice's logits.
            dlogits = _product(h, weight_VD.t()).sub_(lse[:, None]).exp_()
            dlogits.scatter_add_(1, labels.clamp(min=0)[:, None], torch.full_like(lse, -1.0)[:, None])
            dlogits.mul_(torch.where(labels == IGNORE_LABEL, 0, dloss)[:, None])
            dlogits = dlogits.to(h.dtype)
            if ctx.needs_input_grad[0]:
                dh.append(dlogits @ weight_VD)
            if dW_VD is not None:
                if dW_VD.dtype == dlogits.dtype:
                    dW_VD.addmm_(dlogits.t(), h)
                else:
                    dW_VD += _product(dlogits.t(), h)
        return torch.cat(dh) if dh else None, None if dW_VD is None else dW_VD.to(weight_VD.dtype), None
