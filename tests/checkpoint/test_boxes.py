"""Boxes fill what they say, and a reader gets the bytes that writers put there. Why it matters: everything that is resharded passes
through these few functions.

Not covered: several processes (test_reshard), damaged files (tests/train/test_refusals).
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import megamoe.checkpoint.writer as writer_module
from megamoe.checkpoint.boxes import boxes_of_range, intersect, pieces, shifted, slices, uncovered
from megamoe.checkpoint.format import DTYPES
from megamoe.checkpoint.objects import Objects, Taken
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.checkpoint.writer import Writer, commit, new_attempt, write_checkpoint

SHAPES = [(), (1,), (7,), (3, 4), (4, 1, 3), (2, 3, 2, 2), (1, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_range_is_its_boxes_in_order(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(numbers.numel() + 1), 2):
        boxes = list(boxes_of_range(start, stop - start, shape))
        found = [numbers[slices(box, (0,) * len(shape))].reshape(-1) if shape else numbers.view(1) for box in boxes]
        assert torch.cat(found).tolist() == list(range(start, stop)), (start, stop, boxes)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert list(boxes_of_range(0, 0, shape)) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_pieces_fill_their_box_and_none_is_too_large(shape, limit):
    boxes = list(pieces(shape, limit))
    assert uncovered(shape, boxes) == "" and all(math.prod(size) <= limit for _, size in boxes)
    numbers = torch.arange(math.prod(shape)).view(shape)
    assert not shape or torch.cat([numbers[slices(b, (0,) * len(shape))].reshape(-1) for b in boxes]).tolist() == numbers.reshape(-1).tolist()


def test_holes_overlaps_and_parts_outside_are_named():
    half = ((0, 0), (1, 4))
    assert "missing" in uncovered((2, 4), [half])
    assert "overlap" in uncovered((2, 4), [((0, 0), (2, 3)), ((0, 2), (1, 2)), ((1, 2), (1, 1))])
    assert "same place" in uncovered((2, 4), [half, half])
    assert "outside" in uncovered((2, 4), [((1, 0), (2, 4))])
    assert uncovered((2, 4), [half, ((1, 0), (1, 4))]) == ""
    assert intersect(half, ((1, 0), (1, 4))) is None and shifted(half, (3, 5)) == ((3, 5), (1, 4))


def write_randomly(place: Objects, tensors: dict[str, torch.Tensor], num_writers: int, dice: random.Random) -> Checkpoint:
    """Each tensor as flat ranges of random lengths, as ZeRO would cut it, each from a random one of several writers."""
    attempt = new_attempt()
    writers = [Writer(place, 3, attempt, i, file_bytes=200) for i in range(num_writers)]
    for name, values in tensors.items():
        cuts = sorted({0, values.numel(), *(dice.randint(0, values.numel()) for _ in range(3))})
        for start, stop in itertools.pairwise(cuts):
            owner = dice.choice(writers)
            for box in boxes_of_range(start, stop - start, tuple(values.shape)):
                owner.add(name, values[slices(box, (0,) * values.dim())], box[0], tuple(values.shape))
    commit(place, 3, attempt, [w.close() for w in writers], {"a": 1})
    return open_checkpoint(place.location)


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_by_any_writers_reads_back_bit_for_bit(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(writer_module, "PART_BYTES", 64)
    dice = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {f"model/{name}": torch.randint(0, 2, (5, 3, 4)).to(dtype) if dtype is torch.bool else (torch.randn(5, 3, 4) * 9).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"model/vector": torch.randn(33), "model/matrix": torch.randn(17, 9)}
    checkpoint = write_randomly(Objects(tmp_path), tensors, 3, dice)
    assert checkpoint.names() == sorted(tensors) and checkpoint.state == {"a": 1} and checkpoint.step == 3
    wanted = []
    for name, values in tensors.items():
        assert torch.equal(checkpoint.read(name).view(torch.uint8), values.view(torch.uint8))
        offset = tuple(dice.randrange(n) for n in values.shape)
        wanted.append((name, (offset, tuple(dice.randint(0, n - o) for n, o in zip(values.shape, offset)))))
    for (name, box), got in zip(wanted, checkpoint.read_boxes(wanted), strict=True):
        expected = tensors[name][slices(box, (0,) * len(box[0]))]
        assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)), (name, box)
    assert sum(size for _, size in checkpoint.verify_files()) > 0


def test_a_stored_part_is_read_once_for_all_boxes_that_touch_it(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, [("model/w", torch.arange(24.0).view(6, 4))], {})
    checkpoint, reads = open_checkpoint(tmp_path), []
    part_bytes = Checkpoint.part_bytes
    monkeypatch.setattr(Checkpoint, "part_bytes", lambda self, name, part: reads.append(name) or part_bytes(self, name, part))
    checkpoint.read_boxes([("model/w", ((row, 1), (1, 2))) for row in range(6)])
    assert reads == ["model/w"]


def test_scalars_and_empty_tensors_keep_their_shape(tmp_path):
    write_checkpoint(tmp_path, 1, [("model/s", torch.tensor(3.5)), ("model/e", torch.zeros(0, 4))], {})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("model/s").item() == 3.5 and checkpoint.read("model/e").shape == (0, 4)


def test_nothing_is_overwritten_and_nothing_half_gets_a_name(tmp_path, monkeypatch):
    place = Objects(tmp_path)
    place.put("a/b", b"first")
    with pytest.raises(Taken):
        place.put("a/b", b"second")
    assert place.get("a/b") == b"first"

    def stopped(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megamoe.checkpoint.objects.os.fsync", stopped)
    with pytest.raises(Exception, match="No space left on device"):
        place.put("a/c", b"data")
    assert list(place.sizes()) == ["a/b"] and [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
