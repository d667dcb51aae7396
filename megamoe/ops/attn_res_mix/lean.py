"""The mix row by row in plain PyTorch, with its own backward: what CPU runs train with.

Each pass touches one row at a time, so the widest temporary is one (T, D) in fp32 however many rows there are. Kept for
backward: the rows themselves (by reference) and r, v.u, p per row and token.

With u = norm_weight * query, s_i = r_i (v_i.u), upstream do:
    dp_i = v_i.do;  ds_i = p_i (dp_i - sum_j p_j dp_j)
    dv_i = p_i do + ds_i (r_i u - (v_i.u) r_i^3 v_i / D);   du = sum over rows and tokens of ds_i r_i v_i
"""

from __future__ import annotations

import torch

from megamoe.ops.precision import wide


def attn_res_mix(rows, query_D, norm_weight_D, *, eps=1e-5):
    """See the contract in `megamoe.ops.attn_res_mix`."""
    return _Mix.apply(eps, query_D, norm_weight_D, *rows)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, query_D, norm_weight_D, *rows):
        dtype = wide(rows[0].dtype)
        u_D = query_D.to(dtype) * norm_weight_D.to(dtype)
        r, vu = [], []
        for row in rows:
            v_TD = row.to(dtype)
            r.append((v_TD.square().mean(-1) + eps).rsqrt())
            vu.append(v_TD @ u_D)
        r_iT, vu_iT = torch.stack(r), torch.stack(vu)
        p_iT = torch.softmax(r_iT * vu_iT, 0)
        out_TD = rows[0].to(dtype) * p_iT[0, :, None]
        for row, p_T in zip(rows[1:], p_iT[1:]):
            out_TD.addcmul_(row.to(dtype), p_T[:, None])
        ctx.save_for_backward(query_D, norm_weight_D, r_iT, vu_iT, p_iT, *rows)
        return out_TD.to(rows[0].dtype)

    @staticmethod
    def backward(ctx, do_TD):
        query_D, norm_weight_D, r_iT, vu_iT, p_iT, *rows = ctx.saved_tensors
        dtype = wide(rows[0].dtype)
        query, norm_weight = query_D.to(dtype), norm_weight_D.to(dtype)
        u_D, do_TD = query * norm_weight, do_TD.to(dtype)
        dp_iT = torch.stack([(row.to(dtype) * do_TD).sum(-1) for row in rows])
        ds_iT = p_iT * (dp_iT - (p_iT * dp_iT).sum(0))
        along_u_iT = ds_iT * r_iT
        along_v_iT = -ds_iT * vu_iT * r_iT.pow(3) / do_TD.shape[-1]
        du_D = torch.zeros_like(u_D)
        grads = []
        for i, row in enumerate(rows):
            v_TD = row.to(dtype)
            du_D.addmv_(v_TD.t(), along_u_iT[i])
            if not ctx.needs_input_grad[3 + i]:
                grads.append(None)
                continue
            dv_TD = do_TD * p_iT[i, :, None]
            dv_TD.addcmul_(along_u_iT[i, :, None], u_D)
            dv_TD.addcmul_(along_v_iT[i, :, None], v_TD)
            grads.append(dv_TD.to(row.dtype))
        return None, (du_D * norm_weight).to(query_D.dtype), (du_D * query).to(norm_weight_D.dtype), *grads
