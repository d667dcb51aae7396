"""A checkpoint saved on one layout is the same checkpoint on another, optimizer included. Why it matters: a run outlives its cluster.

A few moves of `tools/prove_reshard.py`, which has the whole list, and that the proof itself can fail.
Not covered: NCCL, checkpoints larger than one file a rank.
"""

from __future__ import annotations

import pytest
import torch

from megamoe.checkpoint.config import CheckpointConfig
from megamoe.checkpoint.live import Piece
from megamoe.checkpoint.objects import Objects
from megamoe.checkpoint.reader import open_checkpoint
from megamoe.checkpoint.saver import Saver
from megamoe.checkpoint.writer import write_checkpoint
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import build_mesh
from megamoe.testing.pool import RankPool
from megamoe.testing.reshard import differences, moves, prove

WANTED = ("pp2·dp2·ep2 → dp2·tp2·ep2", "pp2 → tp2, tied embeddings", "tp2 → dp4·ep2, bf16", "pp2·vpp2 → pp2")
CASES = {move.name: move for move in moves()}


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", WANTED)
def test_state_is_bit_equal_and_training_goes_on(pool, tmp_path, name):
    verdict = prove(pool, CASES[name], tmp_path, timeout_s=300)
    assert not verdict.different, verdict.different[:5]
    assert verdict.state_equal and verdict.num_tensors > 300
    assert verdict.loss <= verdict.limit, verdict.loss


def save_with_a_broken_rank(place: str) -> list[str]:
    """On two ranks: a save that works, one whose files rank 1 cannot write, and one more. Each rank's verdicts."""
    cpu = torch.device("cpu")
    with process_group(cpu, 60, deepspeed=False):
        mesh = build_mesh(ParallelConfig())
        store = Objects(place)
        saver = Saver(store, CheckpointConfig(), mesh, cpu, "aaaaaaaa")
        row = torch.full((1, 4), float(mesh.world.rank))
        verdicts = []
        for step in (1, 2, 3):
            broken = step == 2 and mesh.world.rank == 1
            # Only this rank's place: what rank 0 writes of the same save must go too.
            saver.place = Objects("/proc/no/such/disk") if broken else store
            saver.begin(step, [Piece("model/w", (2, 4), ((mesh.world.rank, 0), (1, 4)), row)], {})
            verdicts.append(saver.wait().error)
        return verdicts


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_nothing_of_it_stays(pool, tmp_path):
    first, second = pool.run(save_with_a_broken_rank, 2, str(tmp_path))
    assert first == second and first[0] == first[2] == "" and "/proc/no/such/disk" in first[1] and "\n" not in first[1], first
    assert sorted(Objects(tmp_path).folders()) == ["step_00000001", "step_00000003"]
    assert torch.equal(open_checkpoint(tmp_path).read("model/w"), torch.tensor([[0.0], [1.0]]).expand(2, 4))


def test_the_list_has_every_kind_of_move():
    names = " ".join(CASES)
    assert len(CASES) == len(moves()) >= 12
    assert all(word in names for word in ("vpp2", "cp2", "ep4", "tied", "MTP", "AdamW alone", "bf16", "fp64", "same layout", "Muon's owners"))
    assert sum(move.exact for move in moves()) >= 2


def test_a_bit_a_shape_and_a_missing_tensor_are_differences(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    flipped = w.clone()
    flipped[1, 2] = torch.nextafter(flipped[1, 2], torch.tensor(9.0))
    variants = {"same": {"a": w, "b": w}, "bit": {"a": w, "b": flipped}, "shape": {"a": w, "b": w.view(3, 2)}, "missing": {"a": w}, "sign": {"a": -0.0 * w, "b": w}}
    for name, tensors in variants.items():
        write_checkpoint(tmp_path / name, 1, tensors.items(), {})
    base = open_checkpoint(tmp_path / "same")
    found = {name: differences(base, open_checkpoint(tmp_path / name)) for name in variants}
    assert found == {"same": [], "bit": ["b"], "shape": ["b"], "missing": ["b"], "sign": ["a"]}
