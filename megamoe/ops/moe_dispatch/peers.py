"""Dispatch and combine through memory that the ranks of a group write into directly: what `cuda_ipc` and `shared_memory` share.

Every rank has one *window*, mapped by all its peers:

    flags    (P,)        last meeting at which each peer was seen; written by that peer
    counts   (P, E + 1)  slots of each source rank per expert, and their sum as the source announced it
    rows     (R, D)      what peers write (dispatch) or read (combine)
    extra    (R, D)      gradients that peers write (combine's backward), or where copies come from (deduplicated sends)

A call is phases between *meetings*: a rank stores its meeting number in every peer's flags (release) and waits until all have
stored theirs (acquire). No phase writes what a peer may still be reading:

    dispatch       counts to all · meet · [host: check counts, size the rows] · send · meet · take rows out
    combine        meet · own rows in · meet · pull and sum            the backward of send is this without weights
    combine bwd    meet · own rows in · meet · gradients to owners · meet · take them out

Dispatch begins without a meeting: a peer reads its counts between the two meetings of a dispatch, and nobody is past the second while
one still reads; rows are sent behind a meeting that every pull of the call before precedes.

A wait that lasts too long, or a peer that gave up, ends every rank's wait; what was seen lies in a report that the host reads
before each call and after the counts. Nothing traps and nothing hangs.

The functions that touch memory come as one namespace `ops`: `torch.ops.megamoe` (csrc/moe_dispatch) or `host.py`.
Letters: N tokens, A experts per token, E experts, P ranks, R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megamoe.ops.moe_dispatch.cuda import Slots
from megamoe.utils.errors import RunFailed
from megamoe.utils.torch_compat import group_timeout

ALIGN = 256


class PeerLost(RunFailed):
    """A rank did not come to a meeting, or its counts make no sense. Every rank that is still there raises and prints its own."""


class Memory(Protocol):
    """Where windows come from. device: `cpu` or `cuda`."""

    device: str

    def make(self, num_bytes: int) -> tuple[torch.Tensor, Any]:
        """Zeroed bytes (uint8) and a picklable handle to them."""

    def open(self, handle: Any) -> torch.Tensor:
        """A peer's bytes."""

    def opened(self) -> None:
        """Every rank has opened every handle."""

    def make_report(self, size: int) -> torch.Tensor:
        """(size,) int32 zeros that device and host both see."""

    def sync(self) -> None:
        """Wait until everything enqueued by this rank has run."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Layout:
    """Where things lie in a window of a group of P ranks. `area_bytes`: of rows, and of extra."""

    P: int
    E: int
    area_bytes: int

    @property
    def counts_at(self) -> int:
        return _aligned(4 * self.P)

    @property
    def rows_at(self) -> int:
        return self.counts_at + _aligned(4 * self.P * (self.E + 1))

    @property
    def num_bytes(self) -> int:
        return self.rows_at + 2 * _aligned(self.area_bytes)

    def flags(self, window: torch.Tensor) -> torch.Tensor:
        return window[: 4 * self.P].view(torch.int32)

    def counts(self, window: torch.Tensor) -> torch.Tensor:
        return window[self.counts_at : self.counts_at + 4 * self.P * (self.E + 1)].view(torch.int32).view(self.P, self.E + 1)

    def area(self, window: torch.Tensor, which: int, R: int, D: int, dtype: torch.dtype) -> torch.Tensor:
        """(R, D) of rows (0) or extra (1); D = 0 gives (R,)."""
        begin, size = self.rows_at + which * _aligned(self.area_bytes), R * max(D, 1) * dtype.itemsize
        assert size <= self.area_bytes, f"{size} bytes of rows in an area of {self.area_bytes}"
        flat = window[begin : begin + size].view(dtype)
        return flat.view(R, D) if D else flat


class Windows:
    """All ranks' windows as one of them sees them. Made by every rank of the group at the same call; collective.

    Args:
        group: a process group for handles and for growing; nothing else goes through it.
        memory, ops: see the module.
        name: of the backend, for messages.
        patience_s: how long a meeting may take; None takes the group's own time-out.
    """

    def __init__(self, group, memory: Memory, ops: Any, name: str, patience_s: float | None = None):
        self.group, self.memory, self.ops, self.name = group, memory, ops, name
        self.patience_s = group_timeout(group, memory.device).total_seconds() if patience_s is None else patience_s
        self.me, self.P = dist.get_rank(group), dist.get_world_size(group)
        self.layout: Layout | None = None
        self.report = memory.make_report(2 + self.P)
        self.windows: list[torch.Tensor] = []
        self.meeting = 0
        self.labels: dict[int, str] = {}

    # ---- memory

    def hold(self, E: int, area_bytes: int) -> None:
        """Make room for tables of E experts and areas of so many bytes. Every rank asks for the same; collective where it grows."""
        have = self.layout
        if have is not None and have.E >= E and have.area_bytes >= area_bytes:
            return
        if have is not None:
            E, area_bytes = max(E, have.E), max(area_bytes + area_bytes // 4, have.area_bytes)
            # Nobody may still be reading, and mappings go before the memory does.
            self.memory.sync()
            dist.barrier(group=self.group)
            mine = self.windows[self.me]
            self.windows = []
            dist.barrier(group=self.group)
            del mine
        self.layout = Layout(self.P, E, _aligned(area_bytes))
        window, handle = self.memory.make(self.layout.num_bytes)
        handles: list[Any] = [None] * self.P
        dist.all_gather_object(handles, handle, group=self.group)
        self.windows = [window if p == self.me else self.memory.open(h) for p, h in enumerate(handles)]
        self.meeting, self.labels = 0, {}
        # A peer's flag must not arrive before the window is open everywhere.
        dist.barrier(group=self.group)
        self.memory.opened()

    def areas(self, which: int, rows_P: list[int], D: int, dtype: torch.dtype) -> list[torch.Tensor]:
        assert self.layout is not None
        return [self.layout.area(w, which, R, D, dtype) for w, R in zip(self.windows, rows_P)]

    # ---- meetings

    def meet(self, label: str) -> None:
        """Enqueue a meeting. Everything this rank enqueued before is visible to every rank behind it."""
        assert self.layout is not None
        self.meeting += 1
        self.labels[self.meeting] = label
        self.labels.pop(self.meeting - 64, None)
        self.ops.moe_meet([self.layout.flags(w) for w in self.windows], self.me, self.meeting, self.patience_s, self.report)

    def check(self) -> None:
        """Raise what the report says. Reads memory that the host sees: no sync.

        Raises:
            PeerLost: a meeting failed.
        """
        if not int(self.report[0]):
            return
        at, seen = int(self.report[1]), self.report[2 : 2 + self.P].tolist()
        gave_up = [p for p, n in enumerate(seen) if n < -1]
        missing = [p for p, n in enumerate(seen) if -1 <= n < at]
        what = f"ranks {missing} did not arrive within {self.patience_s:g} s" if missing else f"ranks {gave_up} gave up"
        last = ", ".join(f"rank {p}: {'gave up' if n < -1 else n}" for p, n in enumerate(seen))
        raise PeerLost(f"moe_dispatch {self.name}: rank {self.me} waited at meeting {at} ({self.labels.get(at, '?')}): {what}; last meeting seen of each: {last}. The first rank that ended says why in its own log")

    def check_counts(self, sent_PP: list[list[int]], announced_P: list[int]) -> None:
        """Every rank sees the same table, so every rank raises the same.

        Raises:
            PeerLost: a source's counts do not add up to what it announced.
        """
        wrong = [p for p, (line, total) in enumerate(zip(sent_PP, announced_P)) if sum(line) != total or min(line) < 0]
        if wrong:
            told = "; ".join(f"rank {p} announced {announced_P[p]} rows and counts {sent_PP[p]} (sum {sum(sent_PP[p])}) to each rank" for p in wrong)
            raise PeerLost(f"moe_dispatch {self.name}: counts that cannot be true: {told}")


@dataclass
class Sent:
    """One dispatch, as its backward and `combine` need it. rows_P: rows of every rank."""

    windows: Windows
    slots: Slots
    rows_P: list[int]
    E: int

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots.row_NA, self.slots.owner_NA

    def _hold(self, x: torch.Tensor) -> Windows:
        w = self.windows
        w.check()
        w.hold(self.E, max(self.rows_P) * x.shape[1] * x.element_size())
        return w

    def pull(self, mine_RD: torch.Tensor, weight_NA: torch.Tensor | None, label: str) -> torch.Tensor:
        """(N, D): sum over this rank's slots of the rows that their owners put in. Collective."""
        w, D = self._hold(mine_RD), mine_RD.shape[1]
        rows = w.areas(0, self.rows_P, D, mine_RD.dtype)
        w.meet(f"{label}: free")
        rows[w.me].copy_(mine_RD)
        w.meet(f"{label}: rows")
        return w.ops.moe_combine(rows, *self.table, weight_NA)

    def push_weighted(self, dy_ND: torch.Tensor, mine_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(d_rows of mine_RD, d_weight of this rank's slots). Collective."""
        w, D = self._hold(mine_RD), mine_RD.shape[1]
        rows, d_rows = (w.areas(which, self.rows_P, D, mine_RD.dtype) for which in (0, 1))
        w.meet("combine backward: free")
        rows[w.me].copy_(mine_RD)
        w.meet("combine backward: rows")
        dweight_NA = w.ops.moe_send_weighted(dy_ND.contiguous(), rows, d_rows, *self.table, self.slots.weight_NA, self.slots.source_NA)
        w.meet("combine backward: gradients")
        return d_rows[w.me].clone(), dweight_NA


@dataclass
class Handle:
    """What `combine` needs."""

    sent: Sent
    weight_NA: torch.Tensor  # in the order of topk_idx, in the autograd graph

    def combine(self, out_RD: torch.Tensor) -> torch.Tensor:
        """See `megamoe.ops.moe_dispatch.combine`."""
        return _Combine.apply(out_RD, self.weight_NA, self.sent)


def dispatch(x_ND, topk_idx_NA, topk_weight_NA, *, num_experts: int, windows: Windows, deduplicate: bool = True):
    """The contract of `megamoe.ops.moe_dispatch` between the ranks of `windows`. Syncs the host once, for R.

    deduplicate: a token crosses to a rank once, however many of its experts live there.

    Raises:
        PeerLost: a rank is missing or its counts make no sense.
    """
    w, E, x_ND = windows, num_experts, x_ND.contiguous()
    w.check()
    w.hold(E, 0)
    topk_idx_NA = topk_idx_NA.contiguous()
    total_E, chunk_CE, rank_NA = w.ops.moe_count(topk_idx_NA, E)
    announced = (topk_idx_NA >= 0).sum(dtype=torch.int32)[None]
    # The table may be laid out for more experts than this layer has.
    line = torch.cat([total_E, total_E.new_zeros(w.layout.E - E), announced])
    w.ops.moe_share_counts(line, [w.layout.counts(window) for window in w.windows], w.me)
    w.meet("dispatch: counts")
    table = w.layout.counts(w.windows[w.me])
    counts_PE = table[:, :E].clone(memory_format=torch.contiguous_format)  # peers write into the table again
    told = torch.cat([counts_PE.view(w.P, w.P, E // w.P).sum(-1), table[:, -1:]], 1).tolist()  # the one host sync
    w.check()
    sent_PP, announced_P = [t[:-1] for t in told], [t[-1] for t in told]
    w.check_counts(sent_PP, announced_P)
    rows_P = [sum(column) for column in zip(*sent_PP)]
    *placed, count_e, received = w.ops.moe_place(topk_idx_NA, topk_weight_NA.detach().contiguous(), counts_PE, w.me, chunk_CE, rank_NA)
    sent = Sent(w, Slots(*placed, received), rows_P, E)
    return _Send.apply(x_ND, sent, deduplicate), count_e, Handle(sent, topk_weight_NA)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, sent: Sent, deduplicate: bool):
        ctx.sent = sent
        w = sent._hold(x_ND)
        rows = w.areas(0, sent.rows_P, x_ND.shape[1], x_ND.dtype)
        copy_of = w.areas(1, sent.rows_P, 0, torch.int32) if deduplicate else []
        w.ops.moe_send(x_ND, *sent.table, rows, copy_of)
        w.meet("dispatch: rows")
        mine = rows[w.me].clone()
        if deduplicate:
            w.ops.moe_expand(mine, copy_of[w.me].clone(), sent.slots.received)
        return mine

    @staticmethod
    def backward(ctx, drows_RD):
        return ctx.sent.pull(drows_RD.contiguous(), None, "dispatch backward"), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out_RD, weight_NA, sent: Sent):
        ctx.sent, ctx.weight_dtype = sent, weight_NA.dtype
        out_RD = out_RD.contiguous()
        ctx.save_for_backward(out_RD)
        return sent.pull(out_RD, sent.slots.weight_NA, "combine")

    @staticmethod
    def backward(ctx, dy_ND):
        (out_RD,) = ctx.saved_tensors
        dout_RD, dweight_NA = ctx.sent.push_weighted(dy_ND, out_RD)
        return dout_RD, dweight_NA.to(ctx.weight_dtype), None


def backend(name: str, memory: Callable[[], Memory], ops: Callable[[], Any], alone: Callable, check: Callable[[Any], None] = lambda group: None) -> Callable:
    """The `dispatch` of a backend: windows are made at a group's first call and kept, since all layers share them.

    alone: the dispatch for a group of one. check: raises, on every rank, where a group cannot be served; collective.
    """
    made: dict[Any, Windows] = {}

    def dispatch_between(x_ND, topk_idx_NA, topk_weight_NA, *, group, num_experts):
        if group is None:
            return alone(x_ND, topk_idx_NA, topk_weight_NA, group=None, num_experts=num_experts)
        if group not in made:
            check(group)
            made[group] = Windows(group, memory(), ops(), name)
        return dispatch(x_ND, topk_idx_NA, topk_weight_NA, num_experts=num_experts, windows=made[group])

    return dispatch_between
