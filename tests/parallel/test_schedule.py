"""Schedules do all the work, in an order that cannot hang. Why it matters: a wrong order hangs a cluster, and only there.

The abstract executor has asynchronous sends and blocking receives on one channel per (sender, receiver, direction), as
`parallel/pipeline.py` has. Not covered here: that the pipeline follows the schedule (tests/parallel/test_pipeline.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.parallel.schedule import Action, ScheduleError, one_f_one_b, rows_sent, simulate, split_layers
from megamoe.utils.errors import UserError

LAYOUTS = st.one_of(
    st.tuples(st.integers(1, 9), st.just(1), st.integers(1, 24)),
    st.builds(lambda P, V, groups: (P, V, groups * P), st.integers(2, 8), st.integers(2, 5), st.integers(1, 5)),
)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS, st.data())
def test_every_forward_and_backward_runs_once_without_deadlock_at_any_speed(layout, data):
    P, V, n = layout
    costs = data.draw(st.lists(st.floats(0.1, 10), min_size=P * V, max_size=P * V))
    # `simulate` raises on missing or double work, wrong rank, broken dependency, channel out of order, deadlock.
    result = simulate(one_f_one_b(P, n, V), P * V, forward_cost=lambda c: costs[c], backward_cost=lambda c: 2 * costs[c], send_cost=lambda b: 0.5)
    assert result.makespan >= max(result.busy) > 0
    for (kind, m, c), begin in result.start.items():
        if kind == "F" and c > 0:
            assert begin >= result.start[Action("F", m, c - 1)] + costs[c - 1]
        if kind == "B" and c < P * V - 1:
            assert begin >= result.start[Action("B", m, c + 1)] + 2 * costs[c + 1]


@pytest.mark.parametrize("P, n", [(2, 4), (4, 8), (8, 32), (4, 2)])
def test_1f1b_has_the_known_bubble_and_memory(P, n):
    result = simulate(one_f_one_b(P, n), P)
    assert result.bubble == pytest.approx((P - 1) / (n + P - 1))
    assert result.peak_live == [min(n, P - r) for r in range(P)]


@pytest.mark.parametrize("P, V, n", [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 32)])
def test_interleaving_divides_the_bubble_by_the_chunks_per_rank(P, V, n):
    # Chunks of 1/V of a stage each: the fill takes (P-1)/V of a stage's time instead of P-1.
    result = simulate(one_f_one_b(P, n, V), P * V, forward_cost=lambda c: 1 / V, backward_cost=lambda c: 2 / V)
    assert result.bubble == pytest.approx((P - 1) / V / (n + (P - 1) / V))


def test_planted_faults_are_caught():
    def broken(change):
        schedule = one_f_one_b(3, 4)
        change(schedule)
        return schedule

    def swap(actions, i, j):
        actions[i], actions[j] = actions[j], actions[i]

    with pytest.raises(ScheduleError, match="waits for F1.0, but rank 0 sends F0.0"):
        simulate(broken(lambda s: swap(s[1], 0, 1)), 3)
    with pytest.raises(ScheduleError, match="B0.2 comes before its forward"):
        simulate(broken(lambda s: swap(s[2], 0, 1)), 3)
    with pytest.raises(ScheduleError, match="F3.1 occurs 0 times"):
        simulate(broken(lambda s: s[1].remove(Action("F", 3, 1))), 3)
    with pytest.raises(ScheduleError, match="belongs to rank 1"):
        simulate(broken(lambda s: s[0].append(s[1][0])), 3)
    # Rank 0 waits for a gradient that rank 1 can only send after a forward that rank 0 sends later.
    late = one_f_one_b(2, 3)
    late[0] = [Action("F", 0, 0), Action("B", 0, 0), *[a for a in late[0] if a.micro > 0]]
    late[1] = [Action("F", 0, 1), Action("F", 1, 1), *[a for a in late[1] if a not in (Action("F", 0, 1), Action("F", 1, 1))]]
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at B0.0, rank 1 at F1.1"):
        simulate(late, 2)


def test_bad_interleaving_names_the_way_out():
    with pytest.raises(UserError, match="multiple of 4"):
        one_f_one_b(4, 6, 2)
    with pytest.raises(UserError, match="vpp"):
        one_f_one_b(1, 6, 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_split_is_the_best_there_is(costs, chunks, first, last):
    from itertools import combinations

    if len(costs) < chunks:
        with pytest.raises(UserError):
            split_layers(costs, chunks)
        return
    sizes = split_layers(costs, chunks, first=first, last=last)

    def dearest(borders):
        parts = [sum(costs[a:b]) for a, b in zip(borders, borders[1:])]
        parts[0] += first
        parts[-1] += last
        return max(parts)

    borders = [sum(sizes[:i]) for i in range(chunks + 1)]
    assert min(sizes) >= 1 and borders[-1] == len(costs)
    assert dearest(borders) == min(dearest([0, *cut, len(costs)]) for cut in combinations(range(1, len(costs)), chunks - 1))


@pytest.mark.parametrize("P, V", [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_rows_sent_follow_the_published_formulas(P, V):
    # The formulas count blocks: the running sum at a boundary is one, the embedding (row 0 here) is none.
    after = [c + 1 for c in range(P * V)]
    boundaries = P * V - 1
    cached, naive = rows_sent(after, P), rows_sent(after, P, cached=False)
    assert sum(cached) + boundaries - (P - 1) == P * (P - 1) // 2 + (V - 1) * P**2
    assert sum(naive) + boundaries - boundaries == P * V * (P * V - 1) // 2
    assert max(cached) < P
