"""The mix in Triton, for GPUs without the CUDA extension: half its speed, the same results.

One program holds one token at a time, all D columns of it, and walks over its share of the tokens in a fixed order.

    forward    online softmax over the rows: a row's sum of squares and its product with u come out of one reduction, the
               running output is rescaled, the next row is already on its way
    backward   first every v_i.do, then every dv_i and the program's own du; the second read of a row comes from L2. (Keeping
               the rows in registers between the two was measured five times slower: the compiler widens them and spills.)
    du         one fp32 line per program, added up in program order by a second kernel: same bits on every run

Rows arrive as a tuple of pointers, so nothing is stacked or concatenated. Least traffic, n rows of T x D in 2 bytes:
forward n + 1 rows, backward n + 1 read and n written. Letters: T tokens, D width, n rows, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns one program can hold: 32 fp32 accumulators a thread at 512 threads.
MAX_WIDTH = 16384
WARPS = 16


def attn_res_mix(rows, query_D, norm_weight_D, *, eps=1e-5):
    """See the contract in `megamoe.ops.attn_res_mix`."""
    return _Mix.apply(eps, query_D, norm_weight_D, *rows)


def why_not(*, device="cuda", dtype=torch.bfloat16, D=1, **_) -> str | None:
    """Why these kernels cannot serve a call site, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dtype}"
    if D > MAX_WIDTH:
        return f"takes at most {MAX_WIDTH} columns, got {D}"
    return None if torch.cuda.get_device_capability() >= (8, 0) else "needs compute capability 8.0 or newer"


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _fwd(rows, query, norm_weight, out, rv, T, eps, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """rv: (2, n, T) fp32, the reciprocal norm of each row and its product with u."""
    d = tl.arange(0, BLOCK)
    inside = d < D
    u = tl.load(query + d, mask=inside, other=0.0).to(tl.float32) * tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
    t = tl.program_id(0).to(tl.int64)
    while t < T:
        coming = tl.load(rows[0] + t * D + d, mask=inside, other=0.0)
        top = -float("inf")
        total = 0.0
        mixed = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(N):
            v = coming.to(tl.float32)
            if i + 1 < N:
                coming = tl.load(rows[i + 1] + t * D + d, mask=inside, other=0.0)
            squares, vu = tl.reduce((v * v, v * u), 0, _add2)
            r = 1.0 / tl.sqrt_rn(squares / D + eps)
            tl.store(rv + i * T + t, r)
            tl.store(rv + (N + i) * T + t, vu)
            s = r * vu
            higher = tl.maximum(top, s)
            keep = tl.exp(top - higher)
            add = tl.exp(s - higher)
            mixed = mixed * keep + v * add
            total = total * keep + add
            top = higher
        tl.store(out + t * D + d, (mixed / total).to(out.dtype.element_ty), mask=inside)
        t += tl.num_programs(0)


@triton.jit
def _bwd(
    rows, dout, query, norm_weight, rv, drows, du_PD, T, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WANTED: tl.constexpr
):
    """drows[i] is written where bit i of WANTED is set. du_PD: this program's sum over its tokens and all rows."""
    d = tl.arange(0, BLOCK)
    inside = d < D
    u = tl.load(query + d, mask=inside, other=0.0).to(tl.float32) * tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
    du = tl.zeros([BLOCK], tl.float32)
    t = tl.program_id(0).to(tl.int64)
    while t < T:
        do_raw = tl.load(dout + t * D + d, mask=inside, other=0.0)
        # p from the saved numbers: n scalars, cheaper than a third array.
        r = ()
        vu = ()
        top = -float("inf")
        for i in tl.static_range(N):
            r = r + (tl.load(rv + i * T + t),)
            vu = vu + (tl.load(rv + (N + i) * T + t),)
            top = tl.maximum(top, r[i] * vu[i])
        total = 0.0
        for i in tl.static_range(N):
            total += tl.exp(r[i] * vu[i] - top)
        do = do_raw.to(tl.float32)
        dp = ()
        for i in tl.static_range(0, N, 4):
            # Four products per reduction: the barriers of a reduction cost more than its adds.
            x = ()
            for j in tl.static_range(4):
                if i + j < N:
                    x = x + (tl.load(rows[i + j] + t * D + d, mask=inside, other=0.0).to(tl.float32) * do,)
            if i + 3 < N:
                y0, y1, y2, y3 = tl.reduce((x[0], x[1], x[2], x[3]), 0, _add4)
                dp = dp + (y0, y1, y2, y3)
            else:
                for j in tl.static_range(4):
                    if i + j < N:
                        dp = dp + (tl.sum(x[j], 0),)
        mean = 0.0
        for i in tl.static_range(N):
            mean += tl.exp(r[i] * vu[i] - top) / total * dp[i]
        for i in tl.static_range(N):
            p = tl.exp(r[i] * vu[i] - top) / total
            ds = p * (dp[i] - mean)
            along_u = ds * r[i]
            along_v = -ds * vu[i] * r[i] * r[i] * r[i] / D
            v = tl.load(rows[i] + t * D + d, mask=inside, other=0.0).to(tl.float32)
            du += along_u * v
            if (WANTED >> i) & 1:
                dv = p * do_raw.to(tl.float32) + along_u * u + along_v * v
                tl.store(drows[i] + t * D + d, dv.to(drows[i].dtype.element_ty), mask=inside)
        t += tl.num_programs(0)
    tl.store(du_PD + tl.program_id(0).to(tl.int64) * D + d, du, mask=inside)


@triton.jit
def _sum_du(du_PD, query, norm_weight, dquery, dnorm_weight, P, D, BLOCK: tl.constexpr):
    """Add the programs' lines in order; u = query * norm_weight hands its gradient to both factors."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    du = tl.zeros([BLOCK], tl.float32)
    i = 0
    while i < P:
        du += tl.load(du_PD + i * D + d, mask=inside, other=0.0)
        i += 1
    q = tl.load(query + d, mask=inside, other=0.0).to(tl.float32)
    nu = tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(dquery + d, (du * nu).to(dquery.dtype.element_ty), mask=inside)
    tl.store(dnorm_weight + d, (du * q).to(dnorm_weight.dtype.element_ty), mask=inside)


def mix_fwd(rows, query_D, norm_weight_D, eps, *, programs: int | None = None, warps: int = WARPS):
    """Returns (out_TD, rv_2nT): the mix, and what backward needs of each row and token. Rows contiguous."""
    T, D = rows[0].shape
    out_TD = torch.empty_like(rows[0])
    rv_2nT = torch.empty(2, len(rows), T, dtype=torch.float32, device=out_TD.device)
    if T:
        grid = (min(T, programs or 2 * _multiprocessors(out_TD.device)),)
        _fwd[grid](
            tuple(rows), query_D, norm_weight_D, out_TD, rv_2nT, T, eps, D=D, N=len(rows), BLOCK=triton.next_power_of_2(D), num_warps=warps
        )
    return out_TD, rv_2nT


def mix_bwd(rows, query_D, norm_weight_D, rv_2nT, do_TD, wanted, *, programs: int | None = None):
    """Returns (drows, dquery_D, dnorm_weight_D); drows[i] is None where `wanted[i]` is false. All contiguous."""
    T, D = rows[0].shape
    n, block = len(rows), triton.next_power_of_2(D)
    drows = [torch.empty_like(row) if want else None for row, want in zip(rows, wanted)]
    dquery_D, dnorm_weight_D = torch.empty_like(query_D), torch.empty_like(norm_weight_D)
    P = max(1, min(T, programs or _multiprocessors(do_TD.device)))
    du_PD = torch.empty(P, D, dtype=torch.float32, device=do_TD.device)
    _bwd[(P,)](
        tuple(rows),
        do_TD,
        query_D,
        norm_weight_D,
        rv_2nT,
        tuple(do_TD if d is None else d for d in drows),
        du_PD,
        T,
        D=D,
        N=n,
        BLOCK=block,
        WANTED=sum(1 << i for i, want in enumerate(wanted) if want),
        num_warps=WARPS,
    )
    _sum_du[(triton.cdiv(D, 128),)](du_PD, query_D, norm_weight_D, dquery_D, dnorm_weight_D, P, D, BLOCK=128, num_warps=4)
    return drows, dquery_D, dnorm_weight_D


def _multiprocessors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, query_D, norm_weight_D, *rows):
        query_D, norm_weight_D = query_D.contiguous(), norm_weight_D.contiguous()
        rows = [row.contiguous() for row in rows]
        out_TD, rv_2nT = mix_fwd(rows, query_D, norm_weight_D, eps)
        ctx.save_for_backward(query_D, norm_weight_D, rv_2nT, *rows)
        return out_TD

    @staticmethod
    def backward(ctx, do_TD):
        query_D, norm_weight_D, rv_2nT, *rows = ctx.saved_tensors
        drows, dquery_D, dnorm_weight_D = mix_bwd(rows, query_D, norm_weight_D, rv_2nT, do_TD.contiguous(), ctx.needs_input_grad[3:])
        return None, dquery_D, dnorm_weight_D, *drows
