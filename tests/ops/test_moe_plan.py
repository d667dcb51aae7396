"""Any routing can be placed so that all ranks compute the same number of slots, with at most E/P borrowed experts.

Why: static buffers rest on these bounds. One routing that breaks them overwrites memory on a GPU, so they are searched for
counterexamples, not shown on examples. Not covered: the travel of borrowed weights and of their gradients.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.ops.moe_plan import assign, plan, quotas, reference


@st.composite
def routings(draw):
    """(counts, ranks): few ranks with few experts, counts from empty to all slots in one expert."""
    ranks = draw(st.integers(1, 8))
    own = draw(st.integers(1, 6))
    shape = draw(st.sampled_from(["any", "spiky", "one"]))
    E = ranks * own
    if shape == "one":
        counts = [0] * E
        counts[draw(st.integers(0, E - 1))] = draw(st.integers(0, 500))
    else:
        high = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 1000)) if shape == "spiky" else st.integers(0, 50)
        counts = draw(st.lists(high, min_size=E, max_size=E))
    return counts, ranks


def check(counts, ranks, got):
    count_E, own = torch.tensor(counts), len(counts) // ranks
    share_EP = got.share_EP.cpu().long()
    assert (share_EP >= 0).all()
    assert torch.equal(share_EP.sum(1), count_E), "every slot is computed exactly once"
    assert share_EP.sum(0).tolist() == quotas(sum(counts), ranks), "every rank computes its quota"
    for p in range(ranks):
        foreign = [e for e in range(len(counts)) if share_EP[e, p] and e // own != p]
        listed = [e for e in got.borrowed_Pe[p].tolist() if e >= 0]
        assert foreign == listed and len(foreign) <= own
        assert len({e // own for e in foreign}) <= 1, "a rank borrows from one rank only"


@given(routings())
@settings(max_examples=400, deadline=None)
def test_every_plan_is_balanced_complete_and_within_the_bound(routing):
    counts, ranks = routing
    check(counts, ranks, reference.plan(torch.tensor(counts), ranks))


@given(routings(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_every_slot_gets_one_rank_and_one_place(routing, rng):
    counts, ranks = routing
    got = plan(torch.tensor(counts), ranks)
    slots = [(e, i) for e, c in enumerate(counts) for i in range(c)]
    rng.shuffle(slots)
    slots.append((-1, 0))
    rank, place = assign(torch.tensor([e for e, _ in slots]), torch.tensor([i for _, i in slots]), got)
    assert rank[-1] == -1 and place[-1] == -1
    taken = {}
    for (e, _), r, i in zip(slots[:-1], rank.tolist(), place.tolist()):
        taken.setdefault((e, r), []).append(i)
    for (e, r), places in taken.items():
        assert sorted(places) == list(range(int(got.share_EP[e, r])))


def test_one_hot_rank_fills_the_others_and_a_balanced_routing_borrows_nothing():
    # Rank 0 has everything, 30 slots on each of 4 experts; the quota is 30, so each other rank borrows one expert.
    worst = reference.plan(torch.tensor([30] * 4 + [0] * 12), 4)
    assert (worst.borrowed_Pe >= 0).sum(1).tolist() == [0, 1, 1, 1]
    even = reference.plan(torch.full((16,), 7), 4)
    assert (even.borrowed_Pe == -1).all()


def test_experts_that_do_not_divide_are_refused_in_words():
    with pytest.raises(ValueError, match="10 experts do not divide over 4 ranks"):
        plan(torch.zeros(10, dtype=torch.int64), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("E, P", [(896, 64), (896, 8), (16, 16), (8, 1), (1024, 32), (64, 2)])
@pytest.mark.parametrize("kind", ["random", "zipf", "one", "empty"])
def test_the_gpu_plans_as_the_twin(E, P, kind):
    from megamoe.ops.moe_plan import cuda

    reason = cuda.why_not(E=E, P=P)
    if reason:
        pytest.skip(f"moe_plan cuda: {reason}")
    gen = torch.Generator().manual_seed(E * P)
    counts = {
        "random": torch.randint(0, 300, (E,), generator=gen),
        "zipf": (1e5 / (1 + torch.randperm(E, generator=gen))).long(),
        "one": torch.zeros(E, dtype=torch.int64).index_fill(0, torch.tensor([E - 1]), 131072),
        "empty": torch.zeros(E, dtype=torch.int64),
    }[kind]
    got, want = cuda.load()(counts.cuda(), P), reference.plan(counts, P)
    check(counts.tolist(), P, got)
    assert torch.equal(got.share_EP.cpu(), want.share_EP) and torch.equal(got.borrowed_Pe.cpu(), want.borrowed_Pe)
