"""Pipeline schedules as plain lists, and a simulator that runs them without a GPU.

The model is cut into C = P·V consecutive chunks; chunk c lives on rank c mod P. A schedule is, for every rank, the order
of its forwards F(m, c) and backwards B(m, c). Nothing else is decided: what travels follows from the order.

    V = 1    1F1B (arXiv:2104.04473): rank r runs P-1-r forwards ahead, then one backward after each forward
    V > 1    interleaved 1F1B (same paper): micro-batches pass through a rank's chunks in groups of P

Transport assumed here and provided by `pipeline.py`: every directed edge (sender, receiver, forward or backward) is a
channel of its own, sends are asynchronous, a receive blocks. Such a network cannot deadlock as long as the orders are
consistent, and the two things that could make them inconsistent are what `simulate` checks: a rank that waits for a
message nobody will send before it, and a channel whose messages are awaited in another order than they are sent.

Letters: P pipeline ranks, V chunks per rank, C chunks, m micro-batch, c chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megamoe.utils.errors import check


class Action(NamedTuple):
    """One forward (`F`) or backward (`B`) of micro-batch `micro` through chunk `chunk`."""

    kind: str
    micro: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}.{self.chunk}"


Schedule = list[list[Action]]


def one_f_one_b(num_ranks: int, num_micro: int, chunks_per_rank: int = 1) -> Schedule:
    """The order of every rank's work: 1F1B, interleaved when `chunks_per_rank` > 1.

    Args:
        num_micro: micro-batches of the step, at least 1. Interleaving works through them in groups of `num_ranks`.

    Raises:
        UserError: an interleaved schedule whose micro-batches do not fill whole groups.
    """
    P, V = num_ranks, chunks_per_rank
    check(num_micro >= 1, "micro-batches per step", num_micro, "needs at least 1")
    check(V == 1 or P > 1, "parallel.vpp", V, "virtual stages need parallel.pp of 2 or more; use vpp=1")
    check(V == 1 or num_micro % P == 0, "micro-batches per step", num_micro,
          f"parallel.vpp={V} works in groups of pp={P} micro-batches; use a multiple of {P} (train.global_batch_tokens), or vpp=1")
    return [_rank_order(P, V, num_micro, rank) for rank in range(P)]


def _rank_order(P: int, V: int, num_micro: int, rank: int) -> list[Action]:
    group = P if V > 1 else num_micro
    forward = [(m, v) for first in range(0, num_micro, group) for v in range(V) for m in range(first, min(first + group, num_micro))]
    backward = [(m, V - 1 - v) for m, v in forward]
    # One chunk per rank: a rank P-1-r hops from the end needs that many micro-batches under way to stay busy until its
    # first gradient returns. With V chunks the way is V-1 rounds of P longer, and twice the hops lie before the last chunk.
    ahead = P - 1 - rank if V == 1 else 2 * (P - 1 - rank) + (V - 1) * P
    ahead = min(ahead, len(forward))
    work = [("F", *forward[i]) for i in range(ahead)]
    for i in range(len(forward) - ahead):
        work += [("F", *forward[ahead + i]), ("B", *backward[i])]
    work += [("B", *backward[i]) for i in range(len(forward) - ahead, len(forward))]
    return [Action(kind, m, v * P + rank) for kind, m, v in work]


def source_of(action: Action, num_ranks: int, num_chunks: int) -> int | None:
    """The rank whose message an action waits for, or None: the first forward and the last chunk's backward wait for nobody.

    With one rank nothing travels.
    """
    if num_ranks == 1:
        return None
    if action.kind == "F":
        return (action.chunk - 1) % num_ranks if action.chunk > 0 else None
    return (action.chunk + 1) % num_ranks if action.chunk < num_chunks - 1 else None


def target_of(action: Action, num_ranks: int, num_chunks: int) -> int | None:
    """The rank that waits for an action's result, or None."""
    if num_ranks == 1:
        return None
    if action.kind == "F":
        return (action.chunk + 1) % num_ranks if action.chunk < num_chunks - 1 else None
    return (action.chunk - 1) % num_ranks if action.chunk > 0 else None


class ScheduleError(AssertionError):
    """A schedule that would hang or compute something else. Ours to mend, not the user's."""


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        makespan: end of the last action, in the units of the given costs.
        busy: time each rank computes.
        peak_live: largest number of forwards kept for their backward, per rank, weighted by `chunk_weight`.
        max_in_flight: most messages sent and not yet received on any one channel: what send buffers must hold.
        start: start of every action.
    """

    makespan: float
    busy: list[float]
    peak_live: list[float]
    max_in_flight: int
    start: dict[Action, float]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(
    schedule: Schedule,
    num_chunks: int,
    *,
    forward_cost: Callable[[int], float] = lambda chunk: 1.0,
    backward_cost: Callable[[int], float] = lambda chunk: 2.0,
    send_cost: Callable[[int], float] = lambda boundary: 0.0,
    chunk_weight: Callable[[int], float] = lambda chunk: 1.0,
) -> Simulation:
    """Execute a schedule in abstract time.

    Args:
        forward_cost, backward_cost: time of one micro-batch through a chunk.
        send_cost: time a message spends on boundary c (between chunks c and c+1).
        chunk_weight: activation memory that one forward of a chunk holds until its backward.

    Raises:
        ScheduleError: a deadlock (with where every rank stands), a channel received out of order, work missing, done
            twice or done on the wrong rank.
    """
    P = len(schedule)
    _complete(schedule, num_chunks)
    position, clock, busy = [0] * P, [0.0] * P, [0.0] * P
    live, peak = [0.0] * P, [0.0] * P
    sent: dict[tuple[int, int, str], list[tuple[Action, float]]] = defaultdict(list)
    taken: dict[tuple[int, int, str], int] = defaultdict(int)
    start: dict[Action, float] = {}
    done: set[Action] = set()
    max_in_flight = 0
    moved = True
    while moved:
        moved = False
        for rank in range(P):
            while position[rank] < len(schedule[rank]):
                action = schedule[rank][position[rank]]
                arrival = 0.0
                source = source_of(action, P, num_chunks)
                if action.kind == "B" and Action("F", action.micro, action.chunk) not in done:
                    raise ScheduleError(f"rank {rank}: {action} comes before its forward")
                if P == 1 and action.kind == "F" and action.chunk > 0 and Action("F", action.micro, action.chunk - 1) not in done:
                    raise ScheduleError(f"rank {rank}: {action} comes before the chunk in front of it")
                if source is not None:
                    channel = (source, rank, action.kind)
                    if len(sent[channel]) == taken[channel]:
                        break
                    message, arrival = sent[channel][taken[channel]]
                    expected = Action(action.kind, action.micro, action.chunk + (-1 if action.kind == "F" else 1))
                    if message != expected:
                        raise ScheduleError(f"rank {rank}: {action} waits for {expected}, but rank {source} sends {message} first")
                    taken[channel] += 1
                begin = max(clock[rank], arrival)
                cost = (forward_cost if action.kind == "F" else backward_cost)(action.chunk)
                start[action], clock[rank] = begin, begin + cost
                busy[rank] += cost
                live[rank] += chunk_weight(action.chunk) * (1 if action.kind == "F" else -1)
                peak[rank] = max(peak[rank], live[rank])
                done.add(action)
                target = target_of(action, P, num_chunks)
                if target is not None:
                    channel = (rank, target, action.kind)
                    boundary = action.chunk if action.kind == "F" else action.chunk - 1
                    sent[channel].append((action, clock[rank] + send_cost(boundary)))
                    max_in_flight = max(max_in_flight, len(sent[channel]) - taken[channel])
                position[rank] += 1
                moved = True
    stuck = [f"rank {r} at {schedule[r][position[r]]}" for r in range(P) if position[r] < len(schedule[r])]
    if stuck:
        raise ScheduleError(f"deadlock: {', '.join(stuck)}")
    return Simulation(max(clock), busy, peak, max_in_flight, start)


def _complete(schedule: Schedule, num_chunks: int) -> None:
    """Every (micro-batch, chunk) forward and backward exactly once, on the rank that holds the chunk."""
    seen: dict[Action, int] = defaultdict(int)
    for rank, actions in enumerate(schedule):
        for action in actions:
            seen[action] += 1
            if action.chunk % len(schedule) != rank:
                raise ScheduleError(f"rank {rank}: {action} belongs to rank {action.chunk % len(schedule)}")
    num_micro = 1 + max((a.micro for a in seen), default=-1)
    for kind in "FB":
        for m in range(num_micro):
            for c in range(num_chunks):
                if seen[Action(kind, m, c)] != 1:
                    raise ScheduleError(f"{Action(kind, m, c)} occurs {seen[Action(kind, m, c)]} times")


def split_layers(costs: Sequence[float], num_chunks: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Cut layers into consecutive chunks so that the dearest chunk is as cheap as possible.

    Args:
        costs: of each layer, any unit.
        first, last: extra cost of the first chunk (embedding) and of the last (head, loss, MTP).

    Returns: layers of each chunk, every one at least 1. Of cuts with the same dearest chunk, the most even one.

    Raises:
        UserError: fewer layers than chunks.
    """
    n = len(costs)
    check(n >= num_chunks, "parallel.pp·vpp", num_chunks, f"the model has {n} layers, and every chunk needs one; use at most {n}")
    prefix = [0.0]
    for c in costs:
        prefix.append(prefix[-1] + c)

    def cost(chunk: int, a: int, b: int) -> float:
        return prefix[b] - prefix[a] + (first if chunk == 0 else 0.0) + (last if chunk == num_chunks - 1 else 0.0)

    # best[k][b]: (dearest chunk, sum of squares) over cuts of the first b layers into k chunks, and the last border.
    best: list[dict[int, tuple[tuple[float, float], int]]] = [{0: ((0.0, 0.0), 0)}]
    for k in range(num_chunks):
        row = {}
        for b in range(k + 1, n - (num_chunks - k - 1) + 1):
            options = []
            for a, ((dearest, squares), _) in best[k].items():
                if a < b:
                    here = cost(k, a, b)
                    options.append(((max(dearest, here), squares + here * here), a))
            row[b] = min(options)
        best.append(row)
    sizes, b = [], n
    for k in range(num_chunks, 0, -1):
        a = best[k][b][1]
        sizes.append(b - a)
        b = a
    return sizes[::-1]


def rows_sent(rows_after: Sequence[int], num_ranks: int, *, cached: bool = True) -> list[int]:
    """Finished AttnRes rows that travel over each boundary of the pipeline, beside the running sum, which always does.

    Args:
        rows_after: rows finished when chunk c has run, for every chunk. A block that ends with the chunk is still in the
            running sum: the next layer writes it down.
        cached: every rank keeps the rows it has seen of a micro-batch and receives only new ones; else all of them
            travel at every boundary.

    Returns: C-1 numbers. With one block per chunk, rows and running sums together are P(P-1)/2 + (V-1)P² cached and
        C(C-1)/2 not (arXiv:2603.15031 sec. 4), plus one per boundary at which the embedding's row is new.
    """
    sent = []
    for c in range(len(rows_after) - 1):
        known = rows_after[c + 1 - num_ranks] if cached and c + 1 >= num_ranks else 0
        sent.append(rows_after[c] - known)
    return sent
