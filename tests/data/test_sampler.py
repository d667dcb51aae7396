"""Sample order is computed, never stored, so a run resumes from one integer: what these functions return may not change.

Not covered: statistical quality beyond rough uniformity; nobody's secrets depend on it.
"""

import numpy as np
import pytest

from megamoe.data.sampler import BLEND_CYCLE, BlendOrder, Permutation, SweepOrder, blend_quotas


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 257, 1000, 4096, 4097])
def test_permutation_visits_everything_once(size):
    permutation = Permutation(size, 3, 1)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))
    assert permutation.many(np.arange(size)).tolist() == [permutation(i) for i in range(size)]


def test_permutation_of_a_trillion_needs_no_table():
    permutation = Permutation(10**12, 0)
    seen = {permutation(i) for i in range(1000)}
    assert len(seen) == 1000 and max(seen) < 10**12 and max(seen) > 10**11


def test_permutation_never_changes():
    """A changed value here means that every run in the world resumes into other data."""
    assert [Permutation(10, 1)(i) for i in range(10)] == [5, 9, 4, 6, 0, 8, 3, 2, 1, 7]
    assert [Permutation(10**9, 1, 2)(i) for i in range(3)] == [565993531, 249134068, 157782006]


def test_permutation_spreads_every_element_over_every_place():
    size, keys = 12, 1500
    counts = np.zeros((size, size), int)
    for key in range(keys):
        counts[np.arange(size), Permutation(size, key).many(np.arange(size))] += 1
    expected = keys / size
    # chi-square over 144 cells with 121 degrees of freedom: mean 121, standard deviation 15.6
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert 121 - 5 * 15.6 < chi2 < 121 + 5 * 15.6


def test_keys_and_epochs_give_different_orders():
    orders = {tuple(Permutation(50, seed, epoch).many(np.arange(50))) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_blend_keeps_its_shares_in_every_stretch_and_goes_through_each_source_before_repeating():
    sizes, weights = [700, 90, 31], [0.6, 0.3, 0.1]
    order = BlendOrder(sizes, weights, seed=5)
    drawn = [order.locate(i) for i in range(2 * BLEND_CYCLE)]
    sources = np.array([s for s, _ in drawn])
    for begin in range(0, len(drawn), 512):
        share = np.bincount(sources[begin : begin + 512], minlength=3) / 512
        assert np.abs(share - weights).max() < 3 / 512 + 1 / BLEND_CYCLE
    for s, size in enumerate(sizes):
        windows = [w for source, w in drawn if source == s]
        for begin in range(0, len(windows) - size, size):
            assert sorted(windows[begin : begin + size]) == list(range(size))
        assert windows[:size] != windows[size : 2 * size], "each pass is shuffled anew"


def test_any_sample_can_be_asked_for_first():
    sizes, weights = [700, 90], [1.0, 2.0]
    forward = [BlendOrder(sizes, weights, seed=5).locate(i) for i in range(4400)]
    for i in (4399, 4096, 4095, 17, 0):
        assert BlendOrder(sizes, weights, seed=5).locate(i) == forward[i]


def test_one_source_needs_no_cycle():
    order = BlendOrder([10], [3.0], seed=0)
    assert sorted(order.locate(i)[1] for i in range(10)) == list(range(10))
    assert sorted(order.locate(i)[1] for i in range(10, 20)) == list(range(10))


def test_quotas_are_the_nearest_that_sum_to_the_cycle():
    assert blend_quotas([1, 1]) == [2048, 2048]
    assert blend_quotas([2, 1, 1]) == [2048, 1024, 1024]
    assert sum(blend_quotas([0.6, 0.3, 0.1])) == BLEND_CYCLE
    assert blend_quotas([1e-9, 1, 1])[0] == 1, "a source that was named is seen"
    with pytest.raises(ValueError, match="4096"):
        BlendOrder([1] * 5000, [1.0] * 5000, 0)


def test_sweep_covers_all_sources_once_and_repeats_itself():
    order = SweepOrder([5, 1, 9], seed=0)
    sweep = [order.locate(i) for i in range(15)]
    assert sorted(sweep) == [(0, w) for w in range(5)] + [(1, 0)] + [(2, w) for w in range(9)]
    assert [order.locate(i) for i in range(15, 30)] == sweep, "evaluations compare on the same windows"
