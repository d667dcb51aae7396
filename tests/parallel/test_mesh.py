"""The rank grid. Why it matters: a rank in a wrong group gives wrong sums, not an error. Not covered: process groups."""

from __future__ import annotations

import pytest

from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.mesh import node_crossings, rank_grids
from megamoe.utils.errors import UserError

LAYOUTS = [dict(), dict(tp=2), dict(pp=2, tp=2), dict(pp=4, tp=2), dict(pp=2, cp=2, tp=2, ep=4), dict(ep=8), dict(cp=4, ep=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_axis_partitions_the_world(layout):
    for name, rows in rank_grids(ParallelConfig(**layout), 16).items():
        assert sorted(rank for row in rows for rank in row.tolist()) == list(range(16)), name


def test_tp_neighbours_are_adjacent_and_ep_stays_in_a_stage():
    grids = rank_grids(ParallelConfig(pp=2, cp=2, tp=2, ep=4), 16)
    assert grids["tp"][0].tolist() == [0, 1]
    assert grids["ep"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grids["edp"][0].tolist() == [0, 4]
    assert grids["pp"][0].tolist() == [0, 8]
    assert grids["dp_cp"][0].tolist() == [0, 2, 4, 6]


IMPOSSIBLE = [
    (dict(tp=3), 4, "start 3 ranks or a multiple, or set parallel.tp one of 1, 2, 4"),
    (dict(tp=4, pp=2), 12, "set parallel.tp one of 1, 2, 3, 6, or parallel.pp one of 1, 3"),
    (dict(tp=3, cp=2, pp=2), 8, "set parallel.tp one of 1, 2"),
    (dict(tp=3, cp=3), 4, "shrink two"),
    (dict(dp=2), 4, "parallel.dp=4"),
    (dict(ep=3), 4, "[1, 2, 4]"),
]


@pytest.mark.parametrize("layout, world, hint", IMPOSSIBLE, ids=str)
def test_impossible_layouts_name_what_would_work(layout, world, hint):
    with pytest.raises(UserError) as error:
        rank_grids(ParallelConfig(**layout), world)
    assert hint in str(error.value)


def test_axes_that_fit_a_node_stay_on_it_and_others_say_what_they_cost():
    assert node_crossings(ParallelConfig(tp=4, cp=2, ep=8, pp=2), 32, 8) == []
    (ep,) = node_crossings(ParallelConfig(tp=2, ep=16), 32, 8)
    assert "parallel.ep=16" in ep and "50%" in ep and "ep=8 would fit" in ep
    assert [s.split("=")[0] for s in node_crossings(ParallelConfig(tp=4, cp=4), 16, 8)] == ["parallel.cp"]
