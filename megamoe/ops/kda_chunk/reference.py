"""KDA in plain PyTorch: the literal recurrence, and the chunked form that CPU runs train with.

Legend: T tokens of the packed stream, N documents, H heads, K/V key and value widths; n chunks over all documents,
C = 64 tokens of a chunk, B = 16 rows of a tile. Inside, everything is fp32, or float64 when q is float64.

Chunks restart at document starts and are laid out step-major: first every document's chunk 0, longest documents first,
then every chunk 1, … so that step s of the state scan is one contiguous slice and a finished document drops off its end.

Source: Kimi Linear (arXiv:2510.26692) for the chunked form; code ours. Anchors: see `_decayed_scores`.
"""

from __future__ import annotations

import torch

from megamoe.ops.kda_chunk import CHUNK, L2_EPS, TILE, validate

# A fixed share of the anchor's exponent moved from the key factor to the query factor of a tile (natural log). Any constant gives the same
# product; this one keeps both factors of a tile at -5 a token within e^±60, far from fp32's and bf16's ends. It must not depend on data.
ANCHOR_SHIFT = 15.0


def kda_recurrent(q_THK, k_THK, v_THV, g_THK, beta_TH, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0,
                  scale=None, cu_seqlens=None, initial_state_NHKV=None, output_final_state=False):  # fmt: skip
    """The recurrence of the contract, one token at a time: the truth that everything else is measured against.

    Arguments, results and errors as `megamoe.ops.kda_chunk.kda_chunk`. Differentiable by autograd; keeps every state,
    so T is a few hundred at most. Syncs the host to read cu_seqlens.
    """
    T, H, K, V, N = validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV)
    starts = document_starts(cu_seqlens, T)
    q, k, v, g, beta = activate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, scale)
    outputs, finals = [], []
    for n in range(N):
        S_HKV = q.new_zeros(H, K, V) if initial_state_NHKV is None else initial_state_NHKV[n].to(q.dtype)
        for t in range(starts[n], starts[n + 1]):
            S_HKV = g[t].exp()[..., None] * S_HKV
            residual_HV = v[t] - torch.einsum("hkv,hk->hv", S_HKV, k[t])
            S_HKV = S_HKV + torch.einsum("hk,hv->hkv", beta[t][:, None] * k[t], residual_HV)
            outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q[t]))
        finals.append(S_HKV)
    o_THV = torch.stack(outputs) if outputs else v.new_zeros(0, H, V)
    return o_THV.to(v_THV.dtype), torch.stack(finals) if output_final_state else None


def kda_chunk(q_THK, k_THK, v_THV, g_THK, beta_TH, *, A_log_H, dt_bias_HK=None, gate="bounded", lower_bound=-5.0,
              scale=None, cu_seqlens=None, initial_state_NHKV=None, output_final_state=False):  # fmt: skip
    """Chunked KDA: batched matrix products over all chunks, and a scan over chunks for the state alone.

    Arguments, results and errors as `megamoe.ops.kda_chunk.kda_chunk`. Differentiable by autograd.
    Syncs the host to read cu_seqlens (free on a CPU). Twin: `kda_recurrent`.
    """
    T, H, K, V, N = validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV)
    starts = document_starts(cu_seqlens, T)
    rows = activate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, scale)
    grid = _ChunkGrid(starts, T, q_THK.device)
    q, k, v, g, beta = (grid.to_chunks(x) for x in rows)  # (n, H, C, width), beta (n, H, C, 1)

    G = g.cumsum(-2)
    qk_score, kk_score = _decayed_scores(q, k, G, bounded=gate == "bounded")
    P_nHCC = qk_score.tril()
    L_nHCC = (beta * kk_score).tril(-1)
    exp_G = G.exp()
    # (I + L) [w | u] = β [k e^G | v]: one triangular solve instead of an inverse. The diagonal is taken as one.
    wu = torch.linalg.solve_triangular(L_nHCC, torch.cat([beta * k * exp_G, beta * v], -1), upper=False, unitriangular=True)
    w_nHCK, u_nHCV = wu.split([K, V], -1)
    G_last = G[..., -1:, :]
    kg_nHKC = (k * (G_last - G).exp()).transpose(-1, -2)
    decay_nHK1 = G_last.exp().transpose(-1, -2)

    state = rows[0].new_zeros(N, H, K, V) if initial_state_NHKV is None else initial_state_NHKV.to(q.dtype)
    entering, residual, final_NHKV = _scan(w_nHCK, u_nHCV, kg_nHKC, decay_nHK1, state, grid)
    o_nHCV = (q * exp_G) @ entering + P_nHCC @ residual
    return grid.to_stream(o_nHCV).to(v_THV.dtype), final_NHKV if output_final_state else None


def document_starts(cu_seqlens: torch.Tensor | None, T: int) -> list[int]:
    """cu_seqlens as host integers, checked. Raises ValueError when they do not cover the stream in order."""
    if cu_seqlens is None:
        return [0, T]
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != T or any(a > b for a, b in zip(starts, starts[1:])):
        raise ValueError(f"kda_chunk: cu_seqlens={starts} must rise from 0 to T={T} without falling")
    return starts


def activate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, scale):
    """Raw inputs to what the recurrence reads: normalised and scaled q, normalised k, v, log-decay g ≤ 0, β in (0, 1)."""
    dtype = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    q, k, v, z, beta = (x.to(dtype) for x in (q_THK, k_THK, v_THV, g_THK, beta_TH))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q * (q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() * scale
    k = k * (k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
    if dt_bias_HK is not None:
        z = z + dt_bias_HK.to(dtype)
    rate_H1 = A_log_H.to(dtype).exp()[:, None]
    g = lower_bound * _Sigmoid.apply(rate_H1 * z) if gate == "bounded" else -rate_H1 * _Softplus.apply(z)
    return q, k, v, g, _Sigmoid.apply(beta)


class _Sigmoid(torch.autograd.Function):
    """Sigmoid out of `exp`. torch's own rounds the last few elements of a tensor differently from the others (its
    vector loop and its tail are two formulas), which would make a document's bits depend on what it is packed with."""

    @staticmethod
    def forward(ctx, x):
        e = x.abs().neg().exp()
        ctx.save_for_backward(e)
        return torch.where(x < 0, e, 1.0) / (1.0 + e)

    @staticmethod
    def backward(ctx, grad):
        (e,) = ctx.saved_tensors
        return grad * e / (1.0 + e).square()


class _Softplus(torch.autograd.Function):
    """log(1 + e^x) out of `exp` and `log1p`, for the reason given at `_Sigmoid`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp_min(0.0) + x.abs().neg().exp().log1p()

    @staticmethod
    def backward(ctx, grad):
        return grad * _Sigmoid.apply(ctx.saved_tensors[0])


def _decayed_scores(q, k, G, *, bounded):
    """(sum_c q_ic e^(G_ic - G_jc) k_jc, the same with k_i) for every pair of a chunk, as matrix products.

    The decay is per channel, so it is split as e^(G_i - R) · e^(R - G_j) with one anchor row R per 16-row tile of i.
    R is the tile's FIRST row (plus a constant): a row chosen later would let token t change results before t.
      j in an earlier tile: both exponents ≤ 0 up to the constant, for any gate.
      j in the same tile:   the key factor grows to e^(15·|g|): safe for g ≥ -5, infinite without a bound. The unbounded
                            gate therefore evaluates those 16×16 pairs one by one, masked BEFORE the exponential, so
                            that no inf·0 reaches the gradient.
      j in a later tile, and j > i: zero, or garbage that is finite; the caller masks them.

    Args: q, k, G: (n, H, C, K), G the inclusive cumulative sum of g in the chunk.
    Returns: two (n, H, C, C).
    """
    n, H, C, K = k.shape
    tiles = C // TILE
    G_tile = G.unflatten(-2, (tiles, TILE))
    # The product does not depend on R, so no gradient flows through it: detaching is exact.
    R = G_tile[..., :1, :].detach() - ANCHOR_SHIFT  # (n, H, tiles, 1, K)
    row_factor = (G_tile - R).exp()
    qk_rows = torch.cat([q.unflatten(-2, (tiles, TILE)) * row_factor, k.unflatten(-2, (tiles, TILE)) * row_factor], -2)
    tile_of = torch.arange(C, device=k.device) // TILE
    own = torch.arange(tiles, device=k.device)[:, None]
    hidden = tile_of > own if bounded else tile_of >= own  # (tiles, C)
    exponent = (R - G[..., None, :, :]).masked_fill(hidden[..., None], float("-inf"))
    k_cols = k[..., None, :, :] * exponent.exp()  # (n, H, tiles, C, K)
    score = qk_rows @ k_cols.transpose(-1, -2)  # (n, H, tiles, 2B, C)
    q_score, k_score = score[..., :TILE, :].reshape(n, H, C, C), score[..., TILE:, :].reshape(n, H, C, C)
    if bounded:
        return q_score, k_score
    pair = G_tile[..., :, None, :] - G_tile[..., None, :, :]  # (n, H, tiles, i, j, K)
    later = torch.ones(TILE, TILE, dtype=torch.bool, device=k.device).triu(1)
    weighted = pair.masked_fill(later[..., None], float("-inf")).exp() * k.unflatten(-2, (tiles, TILE))[..., None, :, :]
    diagonal = [torch.einsum("nhtic,nhtijc->nhtij", x.unflatten(-2, (tiles, TILE)), weighted) for x in (q, k)]
    return q_score + _block_diagonal(diagonal[0]), k_score + _block_diagonal(diagonal[1])


def _block_diagonal(blocks):
    """(n, H, tiles, B, B) -> (n, H, C, C) with the blocks on the diagonal."""
    n, H, tiles, B, _ = blocks.shape
    own = torch.eye(tiles, dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("nhtij,ts->nhtisj", blocks, own).reshape(n, H, tiles * B, tiles * B)


def _scan(w_nHCK, u_nHCV, kg_nHKC, decay_nHK1, state_NHKV, grid):
    """Carry the state over the chunks of all documents at once.

    Returns (entering_nHKV: the state before each chunk, residual_nHCV = u - w S, final_NHKV).
    """
    state = state_NHKV.index_select(0, grid.order)
    entering, residuals, finished = [], [], []
    # split, not slices: the backward of a slice fills a tensor as large as the whole once per step.
    parts = (x.split(grid.active) for x in (w_nHCK, u_nHCV, kg_nHKC, decay_nHK1))
    for active, w, u, kg, decay in zip(grid.active, *parts):
        if active < state.shape[0]:
            state, done = state.split([active, state.shape[0] - active])
            finished.append(done)
        residual = u - w @ state
        entering.append(state)
        residuals.append(residual)
        state = decay * state + kg @ residual
    finished.append(state)
    final = torch.cat(finished[::-1]).index_select(0, grid.rank)
    if not entering:
        return state_NHKV[:0], u_nHCV, final
    return torch.cat(entering), torch.cat(residuals), final


class _ChunkGrid:
    """Where each token of the stream sits in the (chunk, row) grid, and back.

    Attributes:
        active: documents still running at each step of the scan; sums to the number of chunks.
        order, rank: documents sorted by their number of chunks, longest first, and the inverse permutation.
    """

    def __init__(self, starts: list[int], T: int, device: torch.device) -> None:
        cu = torch.tensor(starts)
        chunks_N = (cu.diff() + CHUNK - 1) // CHUNK
        order = torch.argsort(chunks_N, descending=True, stable=True)
        steps = int(chunks_N.max())
        running = chunks_N[order] > torch.arange(steps)[:, None]  # (step, document): a prefix of True per step
        self.active = running.sum(1).tolist()
        step, document = running.nonzero(as_tuple=True)
        document = order[document]
        token = (cu[document] + step * CHUNK)[:, None] + torch.arange(CHUNK)
        valid = token < cu[document + 1][:, None]
        slot_of_token = torch.empty(T, dtype=torch.long)
        slot_of_token[token[valid]] = valid.flatten().nonzero().squeeze(-1)
        # Slots past a document's end read row T, which `to_chunks` makes zero: k = v = β = 0 and g = 0 leave the state alone.
        self.token_of_slot = token.masked_fill(~valid, T).flatten().to(device)
        self.slot_of_token = slot_of_token.to(device)
        self.order, self.rank = order.to(device), torch.argsort(order).to(device)

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """(T, H[, width]) -> (n, H, C, width or 1), zero past each document's end."""
        x = x.unsqueeze(-1) if x.dim() == 2 else x
        slots = _ToChunks.apply(x, self.token_of_slot, self.slot_of_token)
        return slots.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    def to_stream(self, x_nHCV: torch.Tensor) -> torch.Tensor:
        """(n, H, C, V) -> (T, H, V)."""
        return _ToStream.apply(x_nHCV.transpose(1, 2).flatten(0, 1), self.token_of_slot, self.slot_of_token)


def _take_or_zero(x, token_of_slot):
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, token_of_slot)


class _ToChunks(torch.autograd.Function):
    """Every token has one slot, so the backward of the gather is the inverse gather: no scatter-add."""

    @staticmethod
    def forward(ctx, x, token_of_slot, slot_of_token):
        ctx.save_for_backward(token_of_slot, slot_of_token)
        return _take_or_zero(x, token_of_slot)

    @staticmethod
    def backward(ctx, grad):
        token_of_slot, slot_of_token = ctx.saved_tensors
        return _ToStream.apply(grad, token_of_slot, slot_of_token), None, None


class _ToStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token_of_slot, slot_of_token):
        ctx.save_for_backward(token_of_slot, slot_of_token)
        return x.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx, grad):
        token_of_slot, slot_of_token = ctx.saved_tensors
        return _ToChunks.apply(grad, token_of_slot, slot_of_token), None, None
