"""What the sm_90 backward of KDA computes, in plain PyTorch: the same tiles, the same order, bf16 exactly where it rounds.

Separates "is this the right function" (exact=True, float64: equal to autograd of the recurrence) from "is the rounding
good enough" (exact=False: the kernels' bf16 operands, fp32 sums). csrc/kda_chunk/sm90_kda_chunk_bwd*.cuh is the twin.

Legend: H heads, C = 64 rows of a chunk, B = 16 rows of a tile, K/V widths. Per chunk and head, with q̂ the normalised
q times scale, k normalised, G the cumulated gate in the chunk (base 2), S the state entering, dS the gradient of the state
leaving, A' = (I + L)^-1 diag(β) and P_ij = q̂_i e^(G_i-G_j) k_j:

    v~  = A' (v - k e^G S)                    do the forward scan's part: v~ and S leave
    dv~ = Pᵀ do + k e^(G_C-G) dS;  dv = A'ᵀ dv~;  dS <- e^(G_C) dS + (q̂ e^G)ᵀ do - (k e^G)ᵀ dv
    dP  = tril(do v~ᵀ)     dL = -stril(dv v~ᵀ)            (dL already carries β of its row)

The last line is what makes one gradient kernel enough: (I + L) v~ = β (v - k e^G S), so the adjoint of the solve is dv / β
and dL is a rank-C product; neither w, u nor a second triangular product is needed, and β is never divided by.
Source: derived from architecture.md's formulas of the chunked backward; code ours.
"""

from __future__ import annotations

import math

import torch

from megamoe.ops.kda_chunk import CHUNK, L2_EPS, TILE

LOG2E = math.log2(math.e)
# Share of a tile's exponent moved from the column factor to the row factor, in base 2. A constant: see reference.py.
SHIFT2 = 15.0 * LOG2E
TILES = CHUNK // TILE


class _Arithmetic:
    """bf16 operands with fp32 sums, or float64 without any rounding."""

    def __init__(self, exact: bool) -> None:
        self.exact, self.dtype = exact, torch.float64 if exact else torch.float32

    def bf(self, x):
        return x if self.exact else x.bfloat16().float()

    def split_mm(self, a, b):
        """a @ b from hi + lo bf16 halves, three products: the tile inverse's arithmetic."""
        if self.exact:
            return a @ b
        a_hi, b_hi = self.bf(a), self.bf(b)
        a_lo, b_lo = self.bf(a - a_hi), self.bf(b - b_hi)
        return a_hi @ b_hi + a_hi @ b_lo + a_lo @ b_hi


def kda_chunk_bwd_emulated(q_THK, k_THK, v_THV, g_THK, beta_TH, do_THV, *, A_log_H, dt_bias_HK=None, lower_bound=-5.0, scale=None,
                           cu_seqlens=None, initial_state_NHKV=None, dfinal_state_NHKV=None, exact=False):  # fmt: skip
    """Gradients of the bounded-gate `kda_chunk` from its raw inputs.

    Args: as `kda_chunk`; do_THV (T, H, V) gradient of o; dfinal_state_NHKV (N, H, K, V) or None.
        exact: float64 without rounding, instead of the kernel's roundings.

    Returns: dict of dq, dk, dg (T, H, K), dv (T, H, V), dbeta (T, H), dA_log (H,), ddt_bias (H, K),
        dinitial_state (N, H, K, V); fp32 (float64 when exact), before the last rounding to the inputs' dtype.

    Host syncs: reads cu_seqlens. Slow on purpose. Twin: csrc/kda_chunk/sm90_kda_chunk_bwd*.cuh.
    """
    ar = _Arithmetic(exact)
    T, H, K = q_THK.shape
    V = v_THV.shape[-1]
    scale = K**-0.5 if scale is None else scale
    starts = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, g, beta, do = (x.to(ar.dtype).transpose(0, 1) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH, do_THV))
    rate = A_log_H.to(ar.dtype).exp()[:, None, None]
    bias = 0.0 if dt_bias_HK is None else dt_bias_HK.to(ar.dtype)[:, None]
    out = {name: torch.zeros_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v), ("dg", g), ("dbeta", beta))}
    out["dA_log"], out["ddt_bias"] = q.new_zeros(H), q.new_zeros(H, K)
    out["dinitial_state"] = q.new_zeros(len(starts) - 1, H, K, V)
    for n, (t0, t1) in enumerate(zip(starts, starts[1:])):
        zero = q.new_zeros(H, K, V)
        S = zero if initial_state_NHKV is None else initial_state_NHKV[n].to(ar.dtype)
        chunks = []
        for c0 in range(t0, t1, CHUNK):
            rows = slice(c0, min(c0 + CHUNK, t1))
            x = _Chunk(ar, *(_pad(y[:, rows]) for y in (q, k, v, g, beta, do)), rate, bias, lower_bound, scale, rows.stop - rows.start)
            S = x.scan_fwd(S)
            chunks.append((rows, x))
        dS = zero if dfinal_state_NHKV is None else dfinal_state_NHKV[n].to(ar.dtype)
        for rows, x in reversed(chunks):
            dS = x.scan_rev(dS)
        out["dinitial_state"][n] = dS
        for rows, x in chunks:
            grads = x.gradients()
            for name in ("dq", "dk", "dv", "dg", "dbeta"):
                out[name][:, rows] = grads[name][:, : x.num_rows]
            out["dA_log"] += grads["dA_log"]
            out["ddt_bias"] += grads["ddt_bias"]
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        out[name] = out[name].transpose(0, 1)
    return out


def _pad(x):
    """Zero rows up to a whole chunk: k = β = 0 and a zero gate leave the state alone."""
    widths = (0, 0) * (x.dim() - 2) + (0, CHUNK - x.shape[1])
    return torch.nn.functional.pad(x, widths)


class _Chunk:
    """One chunk of all heads: what the prep kernel writes, then the two scans' part, then the gradient kernel's."""

    def __init__(self, ar, q, k, v, g_raw, beta_raw, do, rate, bias, lower_bound, scale, num_rows):
        self.ar, self.v, self.do, self.rate, self.lower_bound = ar, v, do, rate, lower_bound
        self.num_rows = num_rows
        live = torch.arange(CHUNK)[:, None] < num_rows
        self.z = g_raw + bias
        self.sigma = torch.sigmoid(rate * self.z)
        self.one_minus_sigma = torch.sigmoid(-rate * self.z)  # 1 - sigma loses everything where the gate saturates
        g2 = torch.where(live, lower_bound * LOG2E * self.sigma, 0.0)
        self.rq, self.rk = ((x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
        self.scale, self.beta = scale, torch.where(live[..., 0], torch.sigmoid(beta_raw), 0.0)
        self.q, self.k = q * self.rq * scale, k * self.rk
        self.G = g2.cumsum(-2)
        self.R = self.G[:, ::TILE]  # (H, TILES, K): first row of each tile
        self.GC = self.G[:, -1:]
        local = self.G - self.R.repeat_interleave(TILE, 1)
        self.e_row, self.e_col = torch.exp2(local + SHIFT2), torch.exp2(-local - SHIFT2)
        bf = ar.bf
        self.kI, self.qI, self.kD = bf(self.k * self.e_row), bf(self.q * self.e_row), bf(self.k * self.e_col)
        to_start = torch.exp2(self.R - SHIFT2).repeat_interleave(TILE, 1)
        to_end = torch.exp2(self.GC - self.R + SHIFT2).repeat_interleave(TILE, 1)
        self.ke, self.qg, self.kg = bf(self.k * self.e_row * to_start), bf(self.q * self.e_row * to_start), bf(self.k * self.e_col * to_end)
        self.to_end = to_end
        self.P, L = self._scores()
        self.A = bf(self._inverse(self.beta[..., None] * L) * self.beta[:, None])
        self.P = bf(self.P)

    def _scores(self):
        """P and k e^(G_i-G_j) k by 16x16 tiles: row operands at their own anchor, earlier columns rescaled in fp32 first."""
        H, C, _ = self.k.shape
        P, L = self.k.new_zeros(H, C, C), self.k.new_zeros(H, C, C)
        for i in range(TILES):
            I = slice(TILE * i, TILE * i + TILE)
            for j in range(i + 1):
                J = slice(TILE * j, TILE * j + TILE)
                col = self.kD[:, J] if i == j else self.ar.bf(self.k[:, J] * self.e_col[:, J] * torch.exp2(self.R[:, i] - self.R[:, j])[:, None])
                P[:, I, J] = self.qI[:, I] @ col.transpose(1, 2)
                L[:, I, J] = self.kI[:, I] @ col.transpose(1, 2)
        return P.tril(), L.tril(-1)

    def _inverse(self, L):
        """(I + L)^-1: forward substitution in the four diagonal tiles, then block by block away from the diagonal."""
        H, C, _ = L.shape
        A = torch.zeros_like(L)
        eye = torch.eye(TILE, dtype=L.dtype)
        tile = lambda i: slice(TILE * i, TILE * i + TILE)  # noqa: E731
        for i in range(TILES):
            A[:, tile(i), tile(i)] = torch.linalg.solve_triangular(eye + L[:, tile(i), tile(i)], eye.expand(H, -1, -1), upper=False, unitriangular=True)
        for distance in range(1, TILES):
            for j in range(TILES - distance):
                i = j + distance
                x = sum(self.ar.split_mm(L[:, tile(i), tile(m)], A[:, tile(m), tile(j)]) for m in range(j, i))
                A[:, tile(i), tile(j)] = -self.ar.split_mm(A[:, tile(i), tile(i)], x)
        return A

    def scan_fwd(self, S):
        bf = self.ar.bf
        self.S = bf(S)
        self.vn = bf(self.A @ bf(self.v - self.ke @ self.S))
        return torch.exp2(self.GC).transpose(1, 2) * S + self.kg.transpose(1, 2) @ self.vn

    def scan_rev(self, dS):
        bf = self.ar.bf
        self.dS = bf(dS)
        dvn = bf(self.P.transpose(1, 2) @ self.do + self.kg @ self.dS)
        self.dv = bf(self.A.transpose(1, 2) @ dvn)
        return torch.exp2(self.GC).transpose(1, 2) * dS + self.qg.transpose(1, 2) @ self.do - self.ke.transpose(1, 2) @ self.dv

    def gradients(self):
        bf = self.ar.bf
        dP, dL = bf((self.do @ self.vn.transpose(1, 2)).tril()), bf(-(self.dv @ self.vn.transpose(1, 2)).tril(-1))
        state_q, state_k, state_kg = self.do @ self.S.transpose(1, 2), -self.dv @ self.S.transpose(1, 2), self.vn @ self.dS.transpose(1, 2)
        dq, dk_row, dk_col, q_dq, k_row, k_col = (torch.zeros_like(self.q) for _ in range(6))
        step = torch.exp2(self.R[:, 1:] - self.R[:, :-1])  # (H, TILES-1, K): from one anchor to the next
        for i in range(TILES):
            I = slice(TILE * i, TILE * i + TILE)
            # Rows: from the chunk's start to this tile's anchor, one earlier tile at a time.
            aq, ak = (x[:, I] * torch.exp2(self.R[:, :1] - SHIFT2) for x in (state_q, state_k))
            for j in range(i + 1):
                J = slice(TILE * j, TILE * j + TILE)
                if j:
                    aq, ak = aq * step[:, j - 1, None], ak * step[:, j - 1, None]
                aq, ak = aq + dP[:, I, J] @ self.kD[:, J], ak + dL[:, I, J] @ self.kD[:, J]
            dq[:, I], dk_row[:, I] = aq * self.e_row[:, I], ak * self.e_row[:, I]
            q_dq[:, I], k_row[:, I] = self.qI[:, I] * aq, self.kI[:, I] * ak
            # Columns: from the chunk's end back to this tile's anchor.
            ac = state_kg[:, I] * torch.exp2(self.GC - self.R[:, -1:] + SHIFT2)
            for j in range(TILES - 1, i - 1, -1):
                J = slice(TILE * j, TILE * j + TILE)
                if j < TILES - 1:
                    ac = ac * step[:, j, None]
                ac = ac + dP[:, J, I].transpose(1, 2) @ self.qI[:, J] + dL[:, J, I].transpose(1, 2) @ self.kI[:, J]
            dk_col[:, I] = ac * self.e_col[:, I]
            k_col[:, I] = self.kD[:, I] * ac
        # A pair (i, j) adds x to row i and takes x from row j, and a strong gate leaves only differences of them. The factors
        # here are therefore the rounded operands of the products above: both sides are the same numbers and cancel exactly.
        dG = q_dq + k_row - k_col
        d_end = (self.S * self.dS).sum(-1) * torch.exp2(self.GC)[:, 0] + (self.kD * self.to_end * state_kg).sum(1)
        dg = dG.flip(1).cumsum(1).flip(1) + d_end[:, None]
        row_q, row_k, col_k = (x.sum(-1, keepdim=True) for x in (q_dq, k_row, k_col))
        dlogit = (1 - self.beta) * ((self.dv * self.v).sum(-1) + row_k[..., 0])
        # L2 norm backward: y·dy is a sum over the products at hand, since the tile's two factors are inverse to each other.
        dq_raw = self.rq * (dq * self.scale - self.qI * self.e_col / self.scale * row_q)
        dk_raw = self.rk * (dk_row + dk_col - self.kI * self.e_col * (row_k + col_k))
        dz = dg * self.lower_bound * self.sigma * self.one_minus_sigma * self.rate
        dz[:, self.num_rows :] = 0
        return dict(dq=dq_raw, dk=dk_raw, dv=self.dv, dg=dz, dbeta=dlogit, dA_log=(dz * self.z).sum((1, 2)), ddt_bias=dz.sum(1))
