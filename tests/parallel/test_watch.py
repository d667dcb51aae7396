"""A rank that hangs or dies ends the run on every rank, and the report names it. Why it matters: on many ranks each victim
blames another one, and nobody knows which node to take out. Not covered: NCCL, whose watchdog may end the process first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time

import pytest
from torch.distributed import TCPStore

from megamoe.parallel import watch
from megamoe.parallel.distributed import free_port
from megamoe.parallel.mesh import Axis, Mesh
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.watch import HungRank
from megamoe.testing.distributed import _entry
from megamoe.testing.processes import CONTEXT, start
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
    queue, port = CONTEXT.Queue(), free_port()
    processes = [start(_entry, fn, rank, 4, port, queue, (overrides, how)) for rank in range(4)]
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
        if how == "killed":
            # Whoever has not noticed yet still lives, and is not to blame.
            assert text.count("did not answer") == 1, (rank, text)
        else:
            assert "process is gone" not in text, (rank, text)


def _watch(store, rank: int) -> watch.Watch:
    made = watch.Watch(Mesh(world=Axis(3, rank, (0, 1, 2))), timeout_s=1)
    made._store = store
    made(f"step {rank}")
    return made


@pytest.mark.parametrize("beating, blamed", [((0, 1), [2]), ((0, 1, 2), [1, 2])], ids=["one is gone", "all live"])
def test_of_those_that_never_noticed_only_a_rank_without_a_beat_is_blamed(monkeypatch, beating, blamed):
    """Rank 0's collective failed. Ranks 1 and 2 have not noticed: with a beat they may be about to."""
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    monkeypatch.setattr(watch, "STILL_S", 1.0)
    store = TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False)
    ranks = [_watch(store, r) for r in range(3)]
    with contextlib.ExitStack() as living:
        for r in beating:
            living.enter_context(ranks[r].explained())
        ranks[0]._write("step 0", failed=True)
        text = ranks[0]._explain(RuntimeError("gloo: Connection closed by peer"))
    assert [r for r in range(3) if f"rank {r} (" in text] == blamed, text
    assert ("process is gone" in text) == (len(beating) == 2)
