"""csrc/moe_dispatch in plain PyTorch: the functions of `torch.ops.megamoe` with the same arguments and results, on a CPU.

For tests of what is built from them (`virtual.py`, `peers.py`) and as the words in which a kernel can be checked. Any float dtype;
sums are those of reference.py, bit for bit. Letters: csrc/moe_dispatch/moe_dispatch.h.
"""

from __future__ import annotations

import time

import torch

from megamoe.ops.precision import wide

GAVE_UP = -(2**31)  # what a rank leaves in its peers' flags when it stops waiting


def moe_count(idx_NA: torch.Tensor, E: int):
    """(total_E, scratch, rank of each slot among this rank's slots of its expert)."""
    id_NA = torch.where(idx_NA < 0, E, idx_NA)
    named_NE = torch.zeros(idx_NA.shape[0], E + 1, dtype=torch.int32).scatter_(1, id_NA, 1)
    before_NE = named_NE.cumsum(0) - named_NE
    return named_NE.sum(0, dtype=torch.int32)[:E], named_NE.new_empty(0, E), before_NE.gather(1, id_NA)


def moe_place(idx_NA, weight_NA, counts_PE, me: int, chunk, rank_NA):
    """Returns (row, owner, weight, source) of the slots in ascending expert id, count_e, received (1,)."""
    P, E = counts_PE.shape
    total_Pe = counts_PE.long().sum(0).view(P, E // P)
    start_E = (total_Pe.cumsum(1) - total_Pe).view(E) + counts_PE[:me].long().sum(0)
    id_NA, source_NA = torch.where(idx_NA < 0, E, idx_NA).sort(dim=1, stable=True)
    filled_NA = id_NA < E
    row_NA = torch.where(filled_NA, start_E[id_NA.clamp(max=E - 1)] + rank_NA.gather(1, source_NA), -1)
    owner_NA = torch.where(filled_NA, id_NA // (E // P), 0)
    count_e = total_Pe[me].int()
    return row_NA.int(), owner_NA.byte(), weight_NA.gather(1, source_NA) * filled_NA, source_NA.byte(), count_e, count_e.sum(0, keepdim=True, dtype=torch.int32)


def _slots_at(p: int, row_NA, owner_NA):
    """(token, slot, row) of every slot that rank p owns."""
    n, a = torch.nonzero((owner_NA == p) & (row_NA >= 0), as_tuple=True)
    return n, a, row_NA[n, a].long()


def moe_send(x_ND, row_NA, owner_NA, rows: list, copy_of: list) -> None:
    """Rows into the owners' buffers; with copy_of one payload per (token, owner)."""
    for p, to in enumerate(rows):
        n, _, at = _slots_at(p, row_NA, owner_NA)
        if copy_of:
            first = torch.ones_like(n, dtype=torch.bool)
            first[1:] = n[1:] != n[:-1]
            copy_of[p][at] = at[first][first.cumsum(0) - 1].int()
            n, at = n[first], at[first]
        to[at] = x_ND[n]


def moe_expand(rows_RD, copy_of, received) -> None:
    R = int(received)
    rows_RD[:R] = rows_RD[copy_of[:R].long()]


def moe_zero_rest(rows_RD, received) -> None:
    rows_RD[int(received) :] = 0


def moe_combine(rows: list, row_NA, owner_NA, weight_NA):
    """(N, D): weighted (or plain) sum over a token's slots, in order, in the wide dtype, rounded once."""
    (N, A), D = row_NA.shape, rows[0].shape[1]
    dtype = wide(rows[0].dtype)
    home_NAD, factor_NA = rows[0].new_zeros(N, A, D), row_NA >= 0 if weight_NA is None else weight_NA
    for p, from_p in enumerate(rows):
        n, a, at = _slots_at(p, row_NA, owner_NA)
        home_NAD[n, a] = from_p[at]
    y_ND = torch.zeros(N, D, dtype=dtype)
    for a in range(A):
        y_ND.addcmul_(home_NAD[:, a].to(dtype), factor_NA[:, a, None].to(dtype))
    return y_ND.to(rows[0].dtype)


def moe_send_weighted(dy_ND, rows: list, d_rows: list, row_NA, owner_NA, weight_NA, source_NA):
    """weight * dy into the owners' d_rows; returns d_weight in the order of idx."""
    dtype = wide(dy_ND.dtype)
    dweight_NA = torch.zeros(row_NA.shape, dtype=dtype)
    for p, (from_p, to_p) in enumerate(zip(rows, d_rows)):
        n, a, at = _slots_at(p, row_NA, owner_NA)
        dy = dy_ND[n].to(dtype)
        dweight_NA[n, source_NA[n, a].long()] = (from_p[at].to(dtype) * dy).sum(-1)
        to_p[at] = (dy * weight_NA[n, a, None].to(dtype)).to(to_p.dtype)
    return dweight_NA


def moe_share_counts(line, counts: list, me: int) -> None:
    for table in counts:
        table[me] = line


def moe_meet(flags: list, me: int, epoch: int, timeout_s: float, report) -> None:
    """Tell every rank that this one is at `epoch`, and wait until they are. See `meet` in moe_dispatch.h.

    Writes of one process are seen by the others in order on x86; a flag written last is seen last. Nothing but tests rests on it.
    """
    if int(report[0]):
        return
    seen, begin, P = flags[me], time.monotonic(), len(flags)
    for table in flags:
        table[me] = epoch
    while not bool(((here := seen[:P].clone()) >= epoch).all()):
        if bool((here == GAVE_UP).any()) or time.monotonic() - begin > timeout_s:
            for table in flags:
                table[me] = GAVE_UP
            report[2 : 2 + P] = here
            report[1], report[0] = epoch, 1
            return
        time.sleep(2e-5)
