"""Experts lent between ranks, and rows that travel through peers' memory, train the model of one rank.

Why: a loan touches weights, gradients, recomputation and the order of collectives at once; peers' memory is shared by all layers and
micro-batches under way. Loss, every reduced gradient, norm, biases and weights after two steps are compared with one rank,
whose experts never move. Not covered: bf16, CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megamoe.layers.config import Placement
from megamoe.ops.moe_dispatch import balanced
from megamoe.parallel.config import ParallelConfig
from megamoe.testing.pool import RankPool
from megamoe.testing.proof import Case, Prover, small_model, trace

PLAIN = small_model()
BALANCED = small_model(moe=replace(PLAIN.moe, placement=Placement.balanced))


def trace_counting_loans(case: Case):
    """`trace`, with the number of experts that this rank borrowed, over all layers, micro-batches and recomputations."""
    original, borrowed = balanced.Loans.of, []

    def of(*args):
        loans = original(*args)
        borrowed.append(loans.num_borrowed)
        return loans

    with mock.patch.object(balanced.Loans, "of", of):
        return trace(case) | {"borrowed": sum(borrowed)}


THROUGH_MEMORY = small_model(moe=replace(PLAIN.moe, dispatch="shared_memory"))


@pytest.fixture(scope="module")
def prover():
    with RankPool(4) as pool:
        yield Prover(lambda fn, world, *args, **kwargs: pool.run(trace_counting_loans if fn is trace else fn, world, *args, **kwargs))


@pytest.mark.parametrize("axes, changes", [(dict(ep=4), dict(recompute="experts")), (dict(pp=2, ep=2), {})], ids=["ep4", "ep2-pp2"])
def test_layout_with_lent_experts_trains_the_model_of_one_rank(prover, axes, changes):
    """Two of the layouts in `testing/matrix.py`, which has ep2, ep2·tp2 and the DeepSpeed form too."""
    verdict, ranks = prover.prove_with_traces(Case(BALANCED, ParallelConfig(**axes), 4, **changes))
    assert verdict.passed, verdict
    assert sum(r["borrowed"] for r in ranks) > 0, "nothing was lent: the proof shows nothing"


def test_steps_through_peers_memory_have_the_bits_of_all_to_all(prover):
    case = Case(THROUGH_MEMORY, ParallelConfig(pp=2, ep=2), 4, recompute="experts")
    verdict, ranks = prover.prove_with_traces(case)
    assert verdict.passed, verdict
    _, others = prover.prove_with_traces(replace(case, model=PLAIN))
    for a, b in zip(ranks, others, strict=True):
        assert a["loss"] == b["loss"] and a["norm"] == b["norm"]
        assert all(torch.equal(w, v) for (_, w), (_, v) in zip(a["weights"], b["weights"], strict=True))
