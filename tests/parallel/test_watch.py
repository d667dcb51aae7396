"""A rank that hangs or dies ends the run on every rank, and the report names it. Why it matters: on many ranks each victim
blames another one, and nobody knows which node to take out. Not covered: NCCL, whose watchdog may end the process first.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.watch import HungRank
from megamoe.testing.small import small_run

TIMEOUT_S = 6


def _train(overrides: list[str], how: str) -> tuple[float, str]:
    """Rank 1 stops in the forward of its second micro-batch of step 2; the others return what they were told, and when."""
    from launch.schema import compose, to_dict
    from megamoe.train.run import pretrain

    rank, forward, calls = int(os.environ["RANK"]), Pipeline._forward, []

    def stopping(self, action, batch, scale):
        calls.append(action)
        if rank == 1 and len(calls) == 6 and self.stage.training:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4 * TIMEOUT_S)
            os._exit(0)
        return forward(self, action, batch, scale)

    Pipeline._forward = stopping
    config = compose(overrides)
    begin = time.monotonic()
    try:
        pretrain(config, to_dict(config))
    except HungRank as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, "finished"


def _ranks(fn, overrides, how):
    """Results of the ranks other than 1, which never returns."""
    import torch.multiprocessing as mp

    from megamoe.parallel.distributed import free_port
    from megamoe.testing.distributed import _entry

    context = mp.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=_entry, args=(fn, rank, 4, port, queue, (overrides, how)), daemon=True) for rank in range(4)]
    for p in processes:
        p.start()
    import pickle

    results = {}
    try:
        while len(results) < 3:
            rank, ok, value = queue.get(timeout=90)
            results[rank] = pickle.loads(value) if ok else (0.0, value)
    finally:
        for p in processes:
            p.kill()
            p.join()
    return results


@pytest.mark.parametrize("how", ["hung", "killed"])
def test_report_names_the_rank_that_stopped(tmp_path, how):
    overrides = small_run(
        tmp_path, engine="plain", train__precision="fp32", train__num_steps=3, parallel__pp=2, parallel__ep=2, parallel__timeout_s=TIMEOUT_S,
        train__micro_batch_tokens=64, train__global_batch_tokens=512, checkpoint__interval_steps=0,
    )
    results = _ranks(_train, overrides, how)
    assert results.keys() == {0, 2, 3}
    for rank, (_, text) in results.items():
        assert "rank 1 (" in text and "did not answer" in text, (rank, text)
        assert "step 2: forward of micro-batch" in text and f"rank {rank} waited in «step 2" in text, (rank, text)
        # Ranks 2 and 3 share only some groups with rank 1, and name them all the same.
        assert "rank 1 (pp [1, 3], dp [0, 1], ep [0, 1]) did not answer" in text, (rank, text)
