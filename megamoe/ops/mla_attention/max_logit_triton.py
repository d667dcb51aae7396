"""Largest logits in one kernel: products on the tensor cores, maxima in registers; no score is written anywhere.

A program owns ROWS queries of one head and walks over the keys that any of them may see. Documents are found by a binary
search in cu_seqlens on the device, so a block may hold many of them and the host waits for nothing. Tiles in which every query
sees every key need no mask; only those at a document's start and on the diagonal have one. Longest rows go first.

The head width is cut into two powers of two (192 = 128 + 64), so that nothing is multiplied for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_WIDTH = 256
ROWS, COLS = 128, 128
FAR = tl.constexpr(2**30)


@triton.jit
def _tile(top, qa, qb, k, k_t, first, last, start, Q: tl.constexpr, A: tl.constexpr, B: tl.constexpr, COLS: tl.constexpr, MASKED: tl.constexpr, keys):
    """`top` joined with the row maxima over keys [start, start + COLS)."""
    col = start + tl.arange(0, COLS)
    da = tl.arange(0, A)
    at = k + col.to(tl.int64)[None, :] * k_t
    if MASKED or A > Q:
        ka = tl.load(at + da[:, None], mask=(col < keys)[None, :] & (da < Q)[:, None], other=0.0)
    else:
        ka = tl.load(at + da[:, None])
    s = tl.dot(qa, ka, input_precision="ieee")
    if B:
        db = A + tl.arange(0, B)
        if MASKED or A + B > Q:
            kb = tl.load(at + db[:, None], mask=(col < keys)[None, :] & (db < Q)[:, None], other=0.0)
        else:
            kb = tl.load(at + db[:, None])
        s = tl.dot(qb, kb, s, input_precision="ieee")
    if MASKED:
        s = tl.where((col[None, :] >= first[:, None]) & (col[None, :] <= last[:, None]), s, float("-inf"))
    return tl.maximum(top, tl.max(s, 1))


@triton.jit
def _max_logit(
    q, k, cu, cu_k, out_HP, T, keys, n, steps, q_t, q_h, k_t, k_h,
    Q: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < T
    # Document of each row: the last one that starts at it or before it. Of equal starts the earlier ones are empty documents.
    low = tl.zeros([ROWS], tl.int32)
    high = low + n
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(cu + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = tl.load(cu_k + low)
    # The queries are their document's last ones.
    last = row + tl.load(cu_k + low + 1) - tl.load(cu + low + 1)
    begin = tl.min(tl.where(inside, first, FAR), 0)
    end = tl.max(tl.where(inside, last, -1), 0) + 1
    tiles = tl.cdiv(end - begin, COLS)
    # [0, head_tiles): a row's document starts inside or later. [head_tiles, full_tiles): every row sees every key. Then the diagonal.
    head_tiles = tl.minimum(tl.cdiv(tl.max(tl.where(inside, first, 0), 0) - begin, COLS), tiles)
    full_tiles = tl.maximum((tl.min(tl.where(inside, last, FAR), 0) + 1 - begin) // COLS, head_tiles)
    full_tiles = tl.minimum(full_tiles, tiles)

    da = tl.arange(0, A)
    at = q + head * q_h + row.to(tl.int64)[:, None] * q_t
    qa = tl.load(at + da[None, :], mask=inside[:, None] & (da < Q)[None, :], other=0.0)
    qb = qa
    if B:
        db = A + tl.arange(0, B)
        qb = tl.load(at + db[None, :], mask=inside[:, None] & (db < Q)[None, :], other=0.0)
    k += head * k_h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(0, head_tiles):
        top = _tile(top, qa, qb, k, k_t, first, last, begin + i * COLS, Q, A, B, COLS, True, keys)
    for i in range(head_tiles, full_tiles):
        top = _tile(top, qa, qb, k, k_t, first, last, begin + i * COLS, Q, A, B, COLS, False, keys)
    for i in range(full_tiles, tiles):
        top = _tile(top, qa, qb, k, k_t, first, last, begin + i * COLS, Q, A, B, COLS, True, keys)
    top = tl.where(inside, top, float("-inf"))
    tl.store(out_HP + head * tl.num_programs(0) + block, tl.max(top, 0))


def why_not(*, device="cuda", dtype=torch.bfloat16, Q=16, **_) -> str | None:
    """Why this kernel cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, got {dtype}"
    if Q > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH}, got {Q}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


def cut_width(Q: int) -> tuple[int, int]:
    """Q as A + B, powers of two of 16 or more, or B = 0; together at least Q, and exactly Q where that can be."""
    A = max(16, 1 << (Q.bit_length() - 1))
    return (A, 0) if A >= Q else (A, max(16, triton.next_power_of_2(Q - A)))


def max_logit(q_THQ, k_THQ, *, cu_seqlens, scale, cu_seqlens_k=None, rows: int = ROWS, cols: int = COLS):
    """See the contract in `max_logit.py`. A NaN among the scores is passed over: its gradients are not finite either, and the
    step is skipped for that."""
    T, H, Q = q_THQ.shape
    if T == 0:
        return torch.full((H,), float("-inf"), device=q_THQ.device)
    q, k = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (q_THQ, k_THQ))
    A, B = cut_width(Q)
    out_HP = torch.empty(H, triton.cdiv(T, rows), dtype=torch.float32, device=q.device)
    n = cu_seqlens.shape[0] - 1
    _max_logit[(out_HP.shape[1], H)](
        q, k, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, out_HP, T, k.shape[0], n, n.bit_length(),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q=Q, A=A, B=B, ROWS=rows, COLS=cols, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out_HP.amax(1) * scale
