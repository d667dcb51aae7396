"""Balancing: the quantile rule balances in five steps, to the same bits however the batch was cut; the others do as written.

Why it matters: the bias is moved by statistics, not by a gradient, so an error here (padding counted, a micro-batch
counted twice under recomputation, ranks averaged instead of pooled) shows in no loss and no gradient check.

Bitwise comparisons need logits that do not depend on the shape of the matrix product: inputs and router weights lie on
a grid of eighths, so that every product and sum is exact in fp32.

Not covered: recomputation inside a whole model (tests/model/test_transformer.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamoe.layers.balance import quantile_bias, sign_bias, threshold_bias, update_router_biases
from megamoe.layers.config import Balancing, MoEConfig
from megamoe.layers.router import LOAD_ONE, Router, histogram_range
from megamoe.testing.distributed import run_distributed

E, K, D, N = 64, 4, 16, 16384  # 1,024 tokens per expert


def skewed_router(balancing: Balancing, skew: float = 1.0, seed: int = 0) -> Router:
    """Column 0 of the weight is a preference that every token shares: input column 0 is always one."""
    router = Router(D, MoEConfig(num_experts=E, top_k=K, balancing=balancing))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(on_grid(torch.randn(E, D, generator=generator) * 0.25))
        router.weight[:, 0] = on_grid(torch.randn(E, generator=generator) * skew)
    return router


def on_grid(x):
    return (x * 8).round() / 8


def tokens(n=N, seed=1):
    x = on_grid(torch.randn(n, D, generator=torch.Generator().manual_seed(seed)))
    x[:, 0] = 1.0
    return x


def run(router, x, mask=None):
    router.accumulate(router(x, mask)[2])


def test_quantile_rule_balances_a_skewed_router_within_five_steps():
    router, seen = skewed_router(Balancing.quantile, skew=1.3), []
    for step in range(6):
        run(router, tokens(seed=step))
        seen.append(update_router_biases(router).max_vio_L.item())
    assert seen[0] >= 8, seen
    assert max(seen[5:]) < 0.2, seen
    assert abs(router.e_score_correction_bias.mean().item()) < 1e-6


def test_quantile_is_within_one_bin_of_the_exact_quantile():
    router = skewed_router(Balancing.quantile)
    router.e_score_correction_bias.copy_(torch.randn(E) * 0.2)
    x = tokens()
    score = torch.sigmoid(x @ router.weight.T)
    cutoff = (score + router.e_score_correction_bias).topk(K + 1, -1).values[:, -1]
    exact = -(score - cutoff[:, None]).topk(N * K // E + 1, 0).values[-1]
    width = histogram_range(router.e_score_correction_bias, 1000)[1].item()
    run(router, x)
    update_router_biases(router)
    assert (router.e_score_correction_bias - (exact - exact.mean())).abs().max() < 2 * width


@pytest.mark.parametrize("balancing", [Balancing.quantile, Balancing.sign, Balancing.threshold])
def test_splits_and_padding_change_no_bit(balancing):
    x = tokens()
    whole = skewed_router(balancing)
    run(whole, x)
    expected = [update_router_biases(whole).count_LE, whole.e_score_correction_bias]
    assert expected[1].any()
    for sizes in ([N // 4] * 4, [1, 5000, 0, N - 5001]):
        router = skewed_router(balancing)
        for part in x.split(sizes):
            run(router, part)
        got = [update_router_biases(router).count_LE, router.e_score_correction_bias]
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), sizes
    router, mask = skewed_router(balancing), torch.ones(N + 300, dtype=torch.bool)
    mask[1000:1200], mask[-100:] = False, False
    padded = on_grid(torch.randn(N + 300, D) * 3)
    padded[mask] = x
    run(router, padded, mask)
    got = [update_router_biases(router).count_LE, router.e_score_correction_bias]
    assert all(torch.equal(a, b) for a, b in zip(got, expected)), "padding"


def test_evaluation_moves_nothing():
    router = skewed_router(Balancing.quantile)
    run(router, tokens())
    update_router_biases(router)
    before = router.e_score_correction_bias.clone()
    router.eval()
    assert router(tokens(seed=9))[2] is None
    update_router_biases(router)
    assert torch.equal(router.e_score_correction_bias, before)


def test_a_step_without_tokens_keeps_the_bias():
    for balancing in Balancing:
        router = skewed_router(balancing)
        router.e_score_correction_bias.copy_(torch.randn(E))
        before = router.e_score_correction_bias.clone()
        report = update_router_biases(router)
        assert report.max_vio_L.item() == 0
        if balancing is not Balancing.threshold:  # which by its rule forgets: no load, no bias
            assert torch.equal(router.e_score_correction_bias, before)
        assert router.e_score_correction_bias.isfinite().all()


def test_statistics_are_used_once():
    router = skewed_router(Balancing.sign)
    run(router, tokens())
    update_router_biases(router)
    assert not router.count_E.any() and not router.histogram_EB.any()


def test_sign_rule_as_written():
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    got = sign_bias(torch.tensor([10, 2, 4, 0]), bias, rate=0.01)
    torch.testing.assert_close(got, torch.tensor([0.49, 0.01, 0.0, -0.49]))


def test_threshold_rule_as_written():
    """Median of 8, 10, 10, 14 is 10. Replaced each step, never added up; no rule but the two comparisons."""
    load = torch.tensor([8.0, 14.0, 10.0, 10.0]) * LOAD_ONE
    assert threshold_bias(load.long(), step=0.1, high=1.2, low=0.8).tolist() == [0.0, -0.1, 0.0, 0.0]
    load[0] = 7.9 * LOAD_ONE
    assert threshold_bias(load.long(), step=0.1, high=1.2, low=0.8).tolist() == [0.1, -0.1, 0.0, 0.0]
    router = skewed_router(Balancing.threshold)
    for seed in range(3):
        run(router, tokens(seed=seed))
        update_router_biases(router)
        assert set(router.e_score_correction_bias.unique().tolist()) <= {torch.tensor(v).item() for v in (-0.1, 0.0, 0.1)}


def test_threshold_load_is_the_softmax_of_the_logits():
    router, x = skewed_router(Balancing.threshold), tokens(500)
    run(router, x)
    expected = torch.softmax((x @ router.weight.T).double(), -1).sum(0)
    torch.testing.assert_close(router.load_E.double() / LOAD_ONE, expected, atol=1e-4, rtol=0)


def test_threshold_bias_moves_the_choice_but_not_the_weights():
    router, x = skewed_router(Balancing.threshold, skew=0.1), tokens(200)
    router.e_score_correction_bias.copy_(torch.where(torch.arange(E) < 8, 0.1, -0.1))
    idx, weight, _ = router(x)
    logits = x @ router.weight.T
    biased = logits + router.e_score_correction_bias
    assert torch.equal(biased.gather(1, idx), biased.topk(K, -1).values)  # by value: the grid has ties
    assert not torch.equal(biased.gather(1, idx), biased.gather(1, logits.topk(K, -1).indices))
    score = torch.sigmoid(logits).gather(1, idx)
    torch.testing.assert_close(weight, score / score.sum(-1, keepdim=True))


def test_equal_scores_go_to_the_lower_id_and_nan_scores_do_not_crash():
    """Ties in a fixed order, so that a resumed or re-laid-out run routes alike; a diverged run ends in a report of its
    loss, not in an index error."""
    router = skewed_router(Balancing.quantile)
    with torch.no_grad():
        router.weight.zero_()
    idx, _, _ = router(tokens(10))
    assert (idx == torch.arange(K)).all()
    with torch.no_grad():
        router.weight.fill_(float("nan"))
    run(router, tokens(10))


def test_one_expert_can_lie_outside_the_others():
    """All mass in one bin, empty bins around it, targets of zero and of everything: no index falls off the histogram."""
    histogram = torch.zeros(3, 10, dtype=torch.int32)
    histogram[0, 0] = histogram[1, 9] = histogram[2, 4] = 5
    got = quantile_bias(histogram, torch.zeros(3), top_k=1)
    assert got.isfinite().all() and got.argsort().tolist() == [0, 2, 1]


def _two_ranks():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    out = []
    for balancing in (Balancing.quantile, Balancing.sign, Balancing.threshold):
        router = skewed_router(balancing)
        for part in (tokens()[:3000] if rank == 0 else tokens()[3000:]).split(4000):
            run(router, part)
        report = update_router_biases(router, dist.group.WORLD)
        out.append((report.count_LE, router.e_score_correction_bias.clone()))
    dist.destroy_process_group()
    return out


def test_ranks_pool_their_counts_bit_for_bit():
    """The quantile of the pool, not a mean of quantiles: two uneven ranks write what one rank writes."""
    for per_rank in run_distributed(_two_ranks, 2):
        for balancing, (count, bias) in zip((Balancing.quantile, Balancing.sign, Balancing.threshold), per_rank):
            router = skewed_router(balancing)
            run(router, tokens())
            report = update_router_biases(router)
            assert torch.equal(report.count_LE, count) and torch.equal(router.e_score_correction_bias, bias), balancing
