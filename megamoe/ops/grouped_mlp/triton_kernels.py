"""Device code of the grouped MLP: five kernels over tiles whose experts are looked up on the device.

    up         gate = x Wg^T, up = x Wu^T from one read of x; hidden = act(gate, up) before anything leaves the SM
    nt         out = hidden Wd^T
    d_hidden   dh = dout Wd, turned into dgate, dup and the recomputed hidden while it is still in registers
    d_rows     dx = dgate Wg + dup Wu in one accumulator
    d_weight   dW_e = a_e^T b_e over the rows of expert e, fp32 sums, stored or added into an fp32 gradient

Which tile belongs to which expert is decided by `plan` from the counts, on the device: the host knows only the upper bound
R / BM + E of row tiles. A program takes tiles p, p + P, …; a tile's own sum runs in one fixed order, so results do not
depend on P. Operands come through tensor-map copies. A tile may read rows of the next expert behind its own: they are
never stored, and `d_weight`, which sums over rows, takes its last partial step through masked loads.

Letters: R rows, E experts here, D width, F expert width; BM, BN, BK the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.ops.situ_glu.triton import act, act_bwd


@triton.jit
def plan(count, row_start, slot_start, expert_of_slot, E, BM: tl.constexpr, BLOCK_E: tl.constexpr, SLOTS: tl.constexpr):
    """Prefix sums of rows and of row tiles ("slots") per expert, and the expert of each slot (E behind the last)."""
    e = tl.arange(0, BLOCK_E)
    c = tl.load(count + e, mask=e < E, other=0).to(tl.int32)
    row_end = tl.cumsum(c, 0)
    slot_end = tl.cumsum((c + BM - 1) // BM, 0)
    if tl.program_id(0) == 0:
        tl.store(row_start + e + 1, row_end, mask=e < E)
        tl.store(slot_start + e + 1, slot_end, mask=e < E)
        tl.store(row_start, 0)
        tl.store(slot_start, 0)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    passed = (slot_end[None, :] <= slot[:, None]) & (e < E)[None, :]
    tl.store(expert_of_slot + slot, tl.sum(passed.to(tl.int32), 1))


@triton.jit
def _swizzle(local, rows, columns, GROUP: tl.constexpr):
    """Row and column of the local-th tile: down GROUP rows, then to the next column, so that neighbours share operands."""
    band = local // (GROUP * columns)
    first = band * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = local - band * GROUP * columns
    return first + inside % height, inside // height


@triton.jit
def _row_tile(tile, columns, row_start, slot_start, expert_of_slot, BM: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, end of the expert's rows, column tile) of a tile. Experts are consecutive blocks of tiles."""
    e = tl.load(expert_of_slot + tile // columns)
    first_slot = tl.load(slot_start + e)
    slots = tl.load(slot_start + e + 1) - first_slot
    m, n = _swizzle(tile - first_slot * columns, slots, columns, GROUP)
    return e, tl.load(row_start + e) + m * BM, tl.load(row_start + e + 1), n


@triton.jit
def up(
    x_desc, wg_desc, wu_desc, gate, up_out, hidden, row_start, slot_start, expert_of_slot, E, F, D, beta, linear_beta,
    SITU: tl.constexpr, APPROX: tl.constexpr, SAVE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    tiles = tl.load(slot_start + E) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        e, row, end, n = _row_tile(tile, columns, row_start, slot_start, expert_of_slot, BM, GROUP)
        w_row = e * F + n * BN
        acc_g = tl.zeros([BM, BN], tl.float32)
        acc_u = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, D, BK):
            x = x_desc.load([row, k])
            acc_g = tl.dot(x, wg_desc.load([w_row, k]).T, acc_g)
            acc_u = tl.dot(x, wu_desc.load([w_row, k]).T, acc_u)
        # Rounded before the activation, as they are kept: forward and backward see the same numbers.
        g = acc_g.to(hidden.dtype.element_ty)
        u = acc_u.to(hidden.dtype.element_ty)
        rows = row + tl.arange(0, BM)
        columns_F = n * BN + tl.arange(0, BN)
        mask = (rows < end)[:, None] & (columns_F < F)[None, :]
        at = rows.to(tl.int64)[:, None] * F + columns_F[None, :]
        if SAVE:
            tl.store(gate + at, g, mask=mask)
            tl.store(up_out + at, u, mask=mask)
        h = act(g.to(tl.float32), u.to(tl.float32), beta, linear_beta, SITU, APPROX)
        tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def nt(
    a_desc, b_desc, out, row_start, slot_start, expert_of_slot, E, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out (R, N) = a (R, K) b_e^T, b seen as (E N, K)."""
    columns = tl.cdiv(N, BN)
    tiles = tl.load(slot_start + E) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        e, row, end, n = _row_tile(tile, columns, row_start, slot_start, expert_of_slot, BM, GROUP)
        b_row = e * N + n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            acc = tl.dot(a_desc.load([row, k]), b_desc.load([b_row, k]).T, acc)
        rows = row + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        mask = (rows < end)[:, None] & (cols < N)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * N + cols[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def d_hidden(
    dout_desc, wd_desc, gate, up_in, dgate, dup, hidden, row_start, slot_start, expert_of_slot, E, F, D, beta, linear_beta,
    SITU: tl.constexpr, APPROX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dh (R, F) = dout (R, D) Wd_e, Wd seen as (E D, F); kept only as what the activation makes of it."""
    columns = tl.cdiv(F, BN)
    tiles = tl.load(slot_start + E) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        e, row, end, n = _row_tile(tile, columns, row_start, slot_start, expert_of_slot, BM, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, D, BK):
            acc = tl.dot(dout_desc.load([row, k]), wd_desc.load([e * D + k, n * BN]), acc)
        # Half the columns at a time: gate, up and their gradients of a whole tile do not fit beside the accumulator.
        left, right = acc.reshape([BM, 2, BN // 2]).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            if half == 0:
                part = left
            else:
                part = right
            rows = row + tl.arange(0, BM)
            cols = n * BN + half * (BN // 2) + tl.arange(0, BN // 2)
            mask = (rows < end)[:, None] & (cols < F)[None, :]
            at = rows.to(tl.int64)[:, None] * F + cols[None, :]
            g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
            u = tl.load(up_in + at, mask=mask, other=0.0).to(tl.float32)
            # The twin's dh is rounded before the activation's gradient; so is this one.
            dh = part.to(hidden.dtype.element_ty).to(tl.float32)
            dg, du, h = act_bwd(g, u, dh, beta, linear_beta, SITU, APPROX)
            tl.store(dgate + at, dg.to(hidden.dtype.element_ty), mask=mask)
            tl.store(dup + at, du.to(hidden.dtype.element_ty), mask=mask)
            tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def d_rows(
    dg_desc, wg_desc, du_desc, wu_desc, dx, row_start, slot_start, expert_of_slot, E, D, F,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dx (R, D) = dg (R, F) Wg_e + du (R, F) Wu_e, weights seen as (E F, D)."""
    columns = tl.cdiv(D, BN)
    tiles = tl.load(slot_start + E) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        e, row, end, n = _row_tile(tile, columns, row_start, slot_start, expert_of_slot, BM, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, F, BK):
            acc = tl.dot(dg_desc.load([row, k]), wg_desc.load([e * F + k, n * BN]), acc)
        for k in tl.range(0, F, BK):
            acc = tl.dot(du_desc.load([row, k]), wu_desc.load([e * F + k, n * BN]), acc)
        rows = row + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        mask = (rows < end)[:, None] & (cols < D)[None, :]
        tl.store(dx + rows.to(tl.int64)[:, None] * D + cols[None, :], acc.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def d_weight(
    a_desc, b_desc, dw_desc, a, b, dw, row_start, E, M, N,
    ADD: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dw (E, M, N) = or += a_e (rows, M)^T b_e (rows, N). An expert without rows gets zero, or is left alone when adding.

    Adding is done by the copy engine (dw_desc, PARTS pieces of columns): nothing is read back into registers. One tile adds to
    an element once per launch, so the order of additions, hence every bit, is that of the launches.
    """
    rows_of_tiles = tl.cdiv(M, BM)
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), E * rows_of_tiles * columns, tl.num_programs(0)):
        e = tile // (rows_of_tiles * columns)
        m, n = _swizzle(tile - e * rows_of_tiles * columns, rows_of_tiles, columns, GROUP)
        start = tl.load(row_start + e)
        end = tl.load(row_start + e + 1)
        whole = (end - start) // BK * BK
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, whole, BK):
            acc = tl.dot(a_desc.load([start + k, m * BM]).T, b_desc.load([start + k, n * BN]), acc)
        cols_M = m * BM + tl.arange(0, BM)
        cols_N = n * BN + tl.arange(0, BN)
        if start + whole < end:
            # The rows behind `end` are another expert's: masked on both sides, since theirs may be NaN.
            rest = start + whole + tl.arange(0, BK)
            at_a = a + rest.to(tl.int64)[:, None] * M + cols_M[None, :]
            at_b = b + rest.to(tl.int64)[:, None] * N + cols_N[None, :]
            inside = (rest < end)[:, None]
            last_a = tl.load(at_a, mask=inside & (cols_M < M)[None, :], other=0.0)
            last_b = tl.load(at_b, mask=inside & (cols_N < N)[None, :], other=0.0)
            acc = tl.dot(last_a.T, last_b, acc)
        if ADD:
            if start < end:
                if PARTS == 1:
                    dw_desc.atomic_add([e, m * BM, n * BN], acc.reshape([1, BM, BN]))
                else:
                    left, right = acc.reshape([BM, 2, BN // 2]).permute(0, 2, 1).split()
                    if PARTS == 2:
                        dw_desc.atomic_add([e, m * BM, n * BN], left.reshape([1, BM, BN // 2]))
                        dw_desc.atomic_add([e, m * BM, n * BN + BN // 2], right.reshape([1, BM, BN // 2]))
                    else:
                        a0, a1 = left.reshape([BM, 2, BN // 4]).permute(0, 2, 1).split()
                        a2, a3 = right.reshape([BM, 2, BN // 4]).permute(0, 2, 1).split()
                        dw_desc.atomic_add([e, m * BM, n * BN], a0.reshape([1, BM, BN // 4]))
                        dw_desc.atomic_add([e, m * BM, n * BN + BN // 4], a1.reshape([1, BM, BN // 4]))
                        dw_desc.atomic_add([e, m * BM, n * BN + BN // 2], a2.reshape([1, BM, BN // 4]))
                        dw_desc.atomic_add([e, m * BM, n * BN + BN // 4 * 3], a3.reshape([1, BM, BN // 4]))
        else:
            at = dw + (e.to(tl.int64) * M + cols_M)[:, None] * N + cols_N[None, :]
            mask = (cols_M < M)[:, None] & (cols_N < N)[None, :]
            tl.store(at, acc.to(dw.dtype.element_ty), mask=mask)


@triton.jit
def zero_rest(out, row_start, E, R, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows of out (R, D) that belong to no expert. A program looks after ROWS of them."""
    begin = tl.maximum(tl.program_id(0) * ROWS, tl.load(row_start + E))
    end = tl.minimum((tl.program_id(0) + 1) * ROWS, R)
    for row in tl.range(begin, end):
        for k in tl.range(0, D, BLOCK):
            d = k + tl.arange(0, BLOCK)
            tl.store(out + tl.cast(row, tl.int64) * D + d, tl.zeros([BLOCK], out.dtype.element_ty), mask=d < D)
