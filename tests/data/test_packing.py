"""Packing decides what a model ever sees: a pair lost or doubled here is invisible in every loss curve.

Not covered: how good the packing is against an optimal one; only that it wastes little.
"""

import numpy as np
import pytest

from megamoe.data.packing import PackingIndex, pack_best_fit, pack_concat


def lengths(seed, n=400, scale=3.0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.1, 0, rng.lognormal(scale, 1.2, n).astype(np.int64) + 1)


def packers(seq_len):
    return {
        "best_fit": lambda p, seed=1: pack_best_fit(p, seq_len, seed=seed, window_documents=64),
        "concat": lambda p, seed=1: pack_concat(p, seq_len, seed=seed),
    }


def windows_of(index):
    for w in range(index.num_windows):
        pieces = slice(index.piece_offset_W[w], index.piece_offset_W[w + 1])
        yield index.document_P[pieces], index.start_P[pieces], index.length_P[pieces]


@pytest.mark.parametrize("kind", ["best_fit", "concat"])
@pytest.mark.parametrize("seq_len", [1, 2, 31, 64, 1000])
def test_every_pair_is_in_exactly_one_window(kind, seq_len):
    pairs = lengths(0)
    index = packers(seq_len)[kind](pairs)
    seen = [np.zeros(n, int) for n in pairs]
    for document, start, length in windows_of(index):
        assert 1 <= len(length) and length.min() >= 1 and length.sum() <= seq_len
        for d, s, n in zip(document, start, length):
            assert s + n <= pairs[d]
            seen[d][s : s + n] += 1
    assert all((counts == 1).all() for counts in seen)
    assert index.num_pairs == pairs.sum()


def test_best_fit_cuts_only_documents_longer_than_a_window_and_into_the_fewest_pieces():
    pairs, seq_len = lengths(1, scale=3.5), 64
    index = packers(seq_len)["best_fit"](pairs)
    assert np.bincount(index.document_P, minlength=len(pairs)).tolist() == (-(-pairs // seq_len)).tolist()


def test_best_fit_wastes_little_and_concat_nothing():
    pairs, seq_len = lengths(2, n=2000, scale=4.0), 512
    least = -(-pairs.sum() // seq_len)
    assert packers(seq_len)["concat"](pairs).num_windows == least
    # One group of all documents: the groups of 64 above would each leave a window half full.
    whole = pack_best_fit(pairs, seq_len, seed=1, window_documents=1 << 16)
    assert whole.num_windows <= least * 1.01 + 1


def test_a_piece_goes_where_the_least_room_is_left():
    # In windows of 8, 5 and 4 leave rooms 3 and 4. Taking the least room, 3 closes the first and 2, 2 the second;
    # taking the most, 3 would leave 3 and 1, and the last 2 would need a third window.
    index = pack_best_fit(np.array([2, 4, 3, 2, 5]), 8, seed=0, window_documents=10)
    assert sorted(sorted(length.tolist()) for _, _, length in windows_of(index)) == [[2, 2, 4], [3, 5]]


@pytest.mark.parametrize("kind", ["best_fit", "concat"])
def test_packing_is_a_function_of_its_arguments_alone(kind):
    pack = packers(64)[kind]
    a, b, other = pack(lengths(3)), pack(lengths(3)), pack(lengths(3), seed=2)
    assert np.array_equal(a.document_P, b.document_P) and np.array_equal(a.piece_offset_W, b.piece_offset_W)
    assert not np.array_equal(a.document_P, other.document_P)


@pytest.mark.parametrize("kind", ["best_fit", "concat"])
@pytest.mark.parametrize("pairs", [[], [0, 0, 0], [1], [7], [8], [0, 16, 0]])
def test_small_and_empty_corpora_pack(kind, pairs):
    index = packers(8)[kind](np.array(pairs, np.int64))
    assert index.num_pairs == sum(pairs)
    assert index.num_windows == -(-sum(pairs) // 8)


def test_a_saved_index_comes_back_mapped(tmp_path):
    index = packers(64)["best_fit"](lengths(4))
    index.save(tmp_path)
    read = PackingIndex.load(tmp_path)
    assert isinstance(read.document_P, np.memmap)
    for name in ("document_P", "start_P", "length_P", "piece_offset_W"):
        assert np.array_equal(getattr(index, name), getattr(read, name))
