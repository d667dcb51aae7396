"""Which window sample number i is: a pure function of (seed, i), with nothing stored.

A run that stopped after consuming N samples resumes with the integer N, whatever its ranks, workers or micro-batch
were and are. That rests on permutations that are computed, not drawn: a Feistel network is a bijection on a power of
two, and following it until it lands below `size` (cycle walking) makes it one on [0, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
# Samples after which a blend has drawn each source exactly its quota. Weights are rounded to 1/4096.
BLEND_CYCLE = 4096


def mix64(x):
    """The 64-bit finaliser of splitmix64, on a Python integer or a uint64 array: every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def hash_key(*key: int) -> int:
    """One 64-bit value for a tuple of integers; the order counts."""
    h = _GOLDEN
    for part in key:
        h = mix64((h ^ part) + _GOLDEN & _MASK)
    return h


class Permutation:
    """A bijection on [0, size), chosen by `key`, evaluated at any point without a table.

    Args:
        size: number of elements, at least 1.
        *key: integers that choose the permutation (seed, epoch, …).
    """

    def __init__(self, size: int, *key: int):
        assert size >= 1, size
        self.size = size
        # Two halves of equal width; the domain is less than 4·size, so a walk takes fewer than 4 steps on average.
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = [hash_key(*key, size, r) for r in range(_ROUNDS)]

    def _feistel(self, x):
        left, right = x >> self._half_bits, x & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (mix64(right ^ key) & self._half_mask)
        return left << self._half_bits | right

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.size, (index, self.size)
        x = self._feistel(index)
        while x >= self.size:
            x = self._feistel(x)
        return x

    def many(self, index: np.ndarray) -> np.ndarray:
        """The permutation at each entry of an integer array, as int64."""
        x = self._feistel(np.asarray(index).astype(np.uint64))
        outside = np.flatnonzero(x >= self.size)
        while len(outside):
            x[outside] = self._feistel(x[outside])
            outside = outside[x[outside] >= self.size]
        return x.astype(np.int64)


class Order(Protocol):
    """Maps a sample index to a window of one of several sources."""

    def locate(self, index: int) -> tuple[int, int]:
        """(source, window of that source) of sample `index` ≥ 0."""


class SweepOrder:
    """Every window of every source once per sweep, shuffled over all of them. Held-out data is read this way.

    Args:
        sizes: windows per source.
        seed: chooses the shuffle, which is the same in each sweep, so that the first k windows are always the same k.
    """

    def __init__(self, sizes: Sequence[int], seed: int):
        self._ends = np.cumsum(sizes)
        self._permutation = Permutation(int(self._ends[-1]), seed)

    def locate(self, index: int) -> tuple[int, int]:
        position = self._permutation(index % self._permutation.size)
        source = int(np.searchsorted(self._ends, position, side="right"))
        return source, position - (int(self._ends[source - 1]) if source else 0)


class BlendOrder:
    """Sources drawn by weight; each source goes through all its windows before it repeats one, reshuffled each time.

    Samples come in cycles of BLEND_CYCLE. Within one, each source has a fixed quota and its samples are spread evenly
    (so that every step sees about the wanted blend); the phase of each source changes from cycle to cycle.

    Args:
        sizes: windows per source, each at least 1.
        weights: positive, any scale.
        seed: chooses all shuffles.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        if len(sizes) > BLEND_CYCLE:
            raise ValueError(f"a blend of {len(sizes)} sources is too large: {BLEND_CYCLE} is the limit; join some of them into one")
        self.sizes = [int(s) for s in sizes]
        self.quotas = blend_quotas(weights)
        self._seed = seed
        self._cycle_slots = lru_cache(maxsize=4)(self._lay_out_cycle)
        self._permutation = lru_cache(maxsize=4 * len(self.sizes))(self._make_permutation)

    def _make_permutation(self, source: int, epoch: int) -> Permutation:
        return Permutation(self.sizes[source], self._seed, source, epoch)

    def _lay_out_cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, rank of the sample among that source's samples of this cycle) for each of the cycle's slots."""
        source_of = np.repeat(np.arange(len(self.quotas)), self.quotas)
        rank_of = np.concatenate([np.arange(quota) for quota in self.quotas])
        phase = np.array([hash_key(self._seed, cycle, s) / 2**64 for s in range(len(self.quotas))])
        due = (rank_of + phase[source_of]) / np.asarray(self.quotas)[source_of]
        slots = np.argsort(due, kind="stable")
        return source_of[slots], rank_of[slots]

    def locate(self, index: int) -> tuple[int, int]:
        cycle, slot = divmod(index, BLEND_CYCLE)
        if len(self.sizes) == 1:
            source, drawn = 0, index
        else:
            sources, ranks = self._cycle_slots(cycle)
            source = int(sources[slot])
            drawn = cycle * self.quotas[source] + int(ranks[slot])
        epoch, position = divmod(drawn, self.sizes[source])
        return source, self._permutation(source, epoch)(position)


def blend_quotas(weights: Sequence[float]) -> list[int]:
    """Samples per source in one cycle: weights rounded by largest remainder to sum to BLEND_CYCLE, at least one each."""
    total = sum(weights)
    exact = [w / total * BLEND_CYCLE for w in weights]
    quotas = [max(1, int(x)) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (quotas[s] - exact[s], s))
    missing = BLEND_CYCLE - sum(quotas)
    for s in by_remainder[: max(0, missing)]:
        quotas[s] += 1
    # Only the "at least one" rule can overshoot; the largest sources pay for it.
    while sum(quotas) > BLEND_CYCLE:
        quotas[quotas.index(max(quotas))] -= 1
    return quotas
