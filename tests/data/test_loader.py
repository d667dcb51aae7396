"""A run may change its ranks and micro-batches when it resumes and still sees the samples it would have seen.

Not covered: the same through a whole training run (tests/train).
"""

import threading

import numpy as np
import pytest
import torch

from megamoe.data.config import DataConfig
from megamoe.data.dataset import build_datasets
from megamoe.data.loader import BatchLoader


@pytest.fixture(scope="module")
def dataset(corpus, tmp_path_factory):
    config = DataConfig(source="indexed", paths=[str(corpus)], cache_dir=str(tmp_path_factory.mktemp("cache")), holdout_fraction=0.0)
    return build_datasets(config, seq_len=64, vocab_size=512, seed=1)[0]


def samples(loader, steps):
    """Window tokens of each step in sample order, from this rank."""
    out = []
    for _ in range(steps):
        tokens = torch.cat([batch.tokens_T for batch in next(loader)])
        out.append(tokens.view(-1, 64))
    loader.close()
    return out


@pytest.mark.parametrize("dp_size, micro", [(1, 1), (1, 12), (2, 3), (4, 1), (12, 1)])
def test_a_step_holds_the_same_samples_for_every_layout(dataset, dp_size, micro):
    steps = 3
    ranks = [samples(BatchLoader(dataset, global_batch_windows=12, micro_batch_windows=micro, dp_rank=r, dp_size=dp_size), steps) for r in range(dp_size)]
    for step in range(steps):
        joined = torch.stack([ranks[r][step] for r in range(dp_size)], dim=1).flatten(0, 1)
        expected = np.stack([dataset.window(step * 12 + i).tokens for i in range(12)])
        assert np.array_equal(joined.numpy(), expected)


def test_resume_needs_one_integer_and_forgets_what_was_only_prefetched(dataset):
    whole = samples(BatchLoader(dataset, global_batch_windows=8, micro_batch_windows=4), 6)
    first = BatchLoader(dataset, global_batch_windows=8, micro_batch_windows=4, prefetch_steps=4)
    head = [torch.cat([b.tokens_T for b in next(first)]).view(-1, 64) for _ in range(2)]
    index = first.next_index
    first.close()
    assert index == 16
    # Two ranks now, and another micro-batch.
    tails = [samples(BatchLoader(dataset, global_batch_windows=8, micro_batch_windows=1, dp_rank=r, dp_size=2, start_index=index), 4) for r in range(2)]
    tail = [torch.stack([tails[0][s], tails[1][s]], dim=1).flatten(0, 1) for s in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(whole, head + tail))


def test_an_error_in_the_thread_reaches_the_training_loop(dataset):
    class Broken:
        def window(self, index):
            if index >= 4:
                raise ValueError("corpus.bin holds token id 999")
            return dataset.window(index)

    loader = BatchLoader(Broken(), global_batch_windows=2, micro_batch_windows=2)
    next(loader), next(loader)
    with pytest.raises(ValueError, match="999"):
        next(loader)
    assert not any(t.name == "megamoe-data" for t in threading.enumerate())


def test_close_stops_a_thread_that_waits_for_room(dataset):
    loader = BatchLoader(dataset, global_batch_windows=2, micro_batch_windows=1, prefetch_steps=1)
    next(loader)
    loader.close()
    loader.close()
    assert not any(t.name == "megamoe-data" for t in threading.enumerate())
    with pytest.raises(StopIteration):
        next(loader)


def test_sizes_that_do_not_divide_name_one_that_does(dataset):
    with pytest.raises(ValueError, match="10 windows does not divide over 4 .* 8 would work"):
        BatchLoader(dataset, global_batch_windows=10, micro_batch_windows=1, dp_size=4)
    with pytest.raises(ValueError, match="micro-batch of 4 windows .* 3 would work"):
        BatchLoader(dataset, global_batch_windows=12, micro_batch_windows=4, dp_size=2)
