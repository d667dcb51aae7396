"""A save happens beside training, whole or not at all. Why it matters: a checkpoint of mixed steps, or a failed save that takes the
last good one along, is noticed only when it is needed.

One process, a store whose puts wait, fail or die on command. Not covered: several ranks (test_reshard), pinned copies (GPU), S3
(test_s3).
"""

from __future__ import annotations

import functools
import json
import threading

import pytest
import torch

import megamoe.checkpoint.saver as saver_module
from megamoe.checkpoint.config import CheckpointConfig
from megamoe.checkpoint.live import Piece
from megamoe.checkpoint.objects import Objects, StoreError
from megamoe.checkpoint.reader import committed, open_checkpoint
from megamoe.checkpoint.retention import kept, retire, sweep
from megamoe.checkpoint.saver import Saver
from megamoe.checkpoint.writer import Writer, write_checkpoint
from megamoe.parallel.mesh import Mesh

CPU = torch.device("cpu")


class Store(Objects):
    """A local place whose `put` asks `on_put(name)` first."""

    def __init__(self, location, on_put=lambda name: None):
        super().__init__(location)
        self.on_put = on_put

    def put(self, name, data):
        self.on_put(name)
        super().put(name, data)


def make_saver(store: Objects, run_id: str = "aaaaaaaa", **config) -> Saver:
    return Saver(store, CheckpointConfig(**config), Mesh(), CPU, run_id)


def pieces(weight: torch.Tensor) -> list[Piece]:
    return [Piece("model/w", tuple(weight.shape), ((0, 0), tuple(weight.shape)), weight)]


def save(saver: Saver, step: int, weight: torch.Tensor, **metrics: float):
    saver.begin(step, pieces(weight), {"progress": {"step": step}}, metrics)
    return saver.wait()


def test_what_is_written_is_the_copy_and_training_may_go_on(tmp_path, monkeypatch):
    # A file per tensor: the thread waits in the put of the first and looks at the second only after the change.
    monkeypatch.setattr(saver_module, "Writer", functools.partial(Writer, file_bytes=1))
    gate = threading.Event()
    saver = make_saver(Store(tmp_path, lambda name: gate.wait(20)))
    weight = torch.arange(12.0).view(3, 4)
    second = Piece("model/z", (3, 4), ((0, 0), (3, 4)), weight)
    saver.begin(5, [*pieces(torch.zeros(1, 1)), second], {})
    assert saver.pending and saver.poll() is None and committed(saver.place) == []
    before = weight.clone()
    weight.fill_(-1)
    gate.set()
    result = saver.wait()
    assert result.error == "" and result.step == 5 and result.num_bytes > 48 and not saver.pending
    assert torch.equal(open_checkpoint(tmp_path).read("model/z"), before)
    assert saver.poll() is None


def test_pieces_of_others_are_not_written(tmp_path):
    weight = torch.zeros(2, 2)
    theirs = Piece("model/v", (2, 2), ((0, 0), (2, 2)), weight, writes=False)
    saver = make_saver(Objects(tmp_path))
    saver.begin(1, [*pieces(weight), theirs], {})
    assert saver.wait().error == "" and open_checkpoint(tmp_path).names() == ["model/w"]


@pytest.mark.parametrize("failing", [".safetensors", "index-", "manifest.json", "commit.json"])
@pytest.mark.parametrize("error", [StoreError("disk: No space left on device"), MemoryError("the writer was killed")], ids=["store", "writer"])
def test_a_save_that_fails_is_one_line_leaves_nothing_and_keeps_the_last_one(tmp_path, failing, error):
    store = Store(tmp_path)
    saver, weight = make_saver(store), torch.ones(2, 2)
    assert save(saver, 1, weight).error == ""

    def fail(name):
        if failing in name:
            raise error

    store.on_put = fail
    weight += 1
    result = save(saver, 2, weight)
    assert result.error == str(error)
    assert committed(store) == ["step_00000001"] and store.folders() == ["step_00000001"]
    assert torch.equal(open_checkpoint(tmp_path).read("model/w"), torch.ones(2, 2))
    store.on_put = lambda name: None
    assert save(saver, 3, weight).error == ""
    assert torch.equal(open_checkpoint(tmp_path).read("model/w"), weight)


def test_no_memory_for_the_copy_is_a_failed_save(tmp_path, monkeypatch):
    saver = make_saver(Objects(tmp_path))

    def full(live):
        raise MemoryError("no host memory")

    monkeypatch.setattr(saver._copy, "take", full)
    assert save(saver, 1, torch.zeros(1, 1)).error == "no host memory" and not saver.pending


def test_a_step_that_another_run_has_committed_stays_theirs(tmp_path):
    write_checkpoint(tmp_path, 4, [("model/w", torch.full((2, 2), 7.0))], {})
    result = save(make_saver(Objects(tmp_path)), 4, torch.zeros(2, 2))
    assert "committed already by another run" in result.error and "checkpoint.dir" in result.error
    assert torch.equal(open_checkpoint(tmp_path).read("model/w"), torch.full((2, 2), 7.0))
    assert len(Objects(tmp_path).folders("step_00000004")) == 1


def test_a_commit_whose_answer_was_lost_is_ours(tmp_path):
    class Forgetful(Store):
        def put(self, name, data):
            super().put(name, data)
            if name.endswith("commit.json"):
                super().put(name, data)  # as the client does when it heard nothing: meets its own object

    assert save(make_saver(Forgetful(tmp_path)), 4, torch.zeros(2, 2)).error == ""


def test_what_stays():
    steps = {s: {"eval_loss": abs(s - 30) / 10} if s % 20 == 10 else {} for s in range(10, 110, 10)}
    assert kept(steps, CheckpointConfig(keep_last=2)) == {90, 100}
    assert kept(steps, CheckpointConfig(keep_last=1, keep_every_steps=40)) == {100, 40, 80}
    # Held-out losses exist at 10, 30, 50, …: 30 is the best, 10 and 50 tie.
    assert kept(steps, CheckpointConfig(keep_last=1, keep_best=1)) == {100, 30}
    assert kept(steps, CheckpointConfig(keep_last=1, keep_best=2)) == {100, 30, 10}
    assert kept({5: {}}, CheckpointConfig(keep_last=3, keep_best=2)) == {5}


def test_old_checkpoints_go_and_tagged_ones_stay(tmp_path):
    saver = make_saver(Objects(tmp_path), keep_last=1, keep_best=1)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}
    for step, loss in losses.items():
        assert save(saver, step, torch.zeros(1, 1), eval_loss=loss).error == ""
        if step == 1:
            (tmp_path / "step_00000001" / "tag_paper").touch()
    assert saver.place.folders() == ["step_00000001", "step_00000002", "step_00000004"] == committed(saver.place)


def test_a_deletion_that_was_cut_short_leaves_no_half_checkpoint(tmp_path):
    place = Objects(tmp_path)
    for step in (1, 2):
        save(make_saver(place), step, torch.zeros(1, 1))

    class Dying(Objects):
        def delete_folder(self, folder):
            raise StoreError("killed")

    assert retire(Dying(tmp_path), CheckpointConfig(keep_last=1)) == []
    assert committed(place) == ["step_00000002"], "unlisted before anything of it was deleted"
    sweep(place, "aaaaaaaa")
    assert place.folders() == ["step_00000002"]


def test_only_left_overs_of_the_own_run_are_swept(tmp_path):
    place = Objects(tmp_path)
    save(make_saver(place), 1, torch.zeros(1, 1))
    for attempt in ("step_00000001/aaaaaaaa00000000", "step_00000002/aaaaaaaa11111111", "step_00000003/bbbbbbbb22222222"):
        place.put(f"{attempt}/00000-0000.safetensors", b"half")
    # What a writer leaves that was killed inside a put, or just before the pointer got its name.
    (tmp_path / "step_00000002" / ".commit.json.12345678").write_bytes(b"{")
    assert sorted(sweep(place, "aaaaaaaa")) == ["step_00000001/aaaaaaaa00000000", "step_00000002/aaaaaaaa11111111"]
    assert place.folders() == ["step_00000001", "step_00000003"] and committed(place) == ["step_00000001"]
    open_checkpoint(tmp_path).read("model/w")


def test_the_pointer_says_how_good_the_checkpoint_was(tmp_path):
    save(make_saver(Objects(tmp_path)), 1, torch.zeros(1, 1), eval_loss=2.5)
    assert json.loads((tmp_path / "step_00000001" / "commit.json").read_text())["metrics"] == {"eval_loss": 2.5}
