"""What one rank holds of a checkpoint's tensors: live memory as boxes of logical tensors. Saving copies it out, loading fills it.

    pieces = weight_pieces(stage, mesh) + state_pieces(optimizer.state_fragments(), mesh)
    values = read_pieces(checkpoint, pieces)        # verified, on the CPU; nothing live has been touched
    fill(pieces, values)

Every rank reads what it holds, also where others hold the same, so that loading needs no collective. Of a tensor's replicas
one rank writes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megamoe.checkpoint.boxes import Box, boxes_of_range, shifted
from megamoe.checkpoint.format import DTYPE_NAMES, MODEL, OPTIM
from megamoe.checkpoint.reader import Checkpoint
from megamoe.model.params import logical_name
from megamoe.parallel.engine import StateFragment
from megamoe.parallel.mesh import Mesh
from megamoe.utils.errors import check


@dataclass(frozen=True)
class Piece:
    """One box of one logical tensor in this rank's memory.

    Attributes:
        name: tensor name, see docs/checkpoint.md.
        shape: of the whole tensor.
        box: where this part lies in it.
        values: live, of the box's shape.
        writes: whether this rank is the one that saves it.
        instead: name of the tensor to load from where a checkpoint has none of this name: the weight itself, for its wide copy.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor
    writes: bool = True
    instead: str = ""


def weight_pieces(stage: nn.Module, mesh: Mesh) -> list[Piece]:
    """Parameters and saved buffers of this rank's part of the model, as `model/…`. Pure: every rank of an axis makes the same plan.

    Writers of replicated tensors are spread over the ranks that hold them, by bytes.
    """
    writers, parameters, pieces = _Writers(mesh), dict(stage.named_parameters()), []
    for path, tensor in stage.state_dict(keep_vars=True).items():
        info = parameters[path].megamoe if path in parameters else None
        name, shape, offset, axis = (info.name, info.global_shape, info.offset, info.reduce_axis) if info else (logical_name(path), tuple(tensor.shape), (0,) * tensor.dim(), "stage")
        values = tensor.detach()
        pieces.append(Piece(MODEL + name, tuple(shape), (tuple(offset), tuple(values.shape)), values, writers.mine(axis, values)))
    return pieces


def state_pieces(fragments: Iterable[StateFragment], mesh: Mesh) -> list[Piece]:
    """Optimizer state as `optim/KEY/P`. A fragment of a flat buffer is a few boxes of the whole tensor.

    A wide copy of a weight that is as wide itself is loaded but never saved.
    """
    writers, pieces = _Writers(mesh), []
    for p, key, first, values, replicated in fragments:
        info = p.megamoe
        redundant = key == "master" and p.dtype == values.dtype
        writes = not redundant and (not replicated or writers.mine(info.reduce_axis, values))
        instead = MODEL + info.name if key == "master" else ""
        done = 0
        for box in boxes_of_range(first, values.numel(), tuple(p.shape)):
            count = math.prod(box[1])
            part = values.narrow(0, done, count).view(box[1])
            pieces.append(Piece(f"{OPTIM}{key}/{info.name}", tuple(info.global_shape), shifted(box, info.offset), part, writes, instead))
            done += count
    return pieces


class _Writers:
    """Gives each replicated tensor to the rank of its axis that has the least to write so far."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._bytes: dict[str, list[int]] = {}

    def mine(self, axis_name: str, values: torch.Tensor) -> bool:
        axis = getattr(self.mesh, axis_name)
        load = self._bytes.setdefault(axis_name, [0] * axis.size)
        writer = load.index(min(load))
        load[writer] += values.numel() * values.element_size()
        return writer == axis.rank


def check_pieces(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> None:
    """Compare names, shapes and dtypes with what is held here, before any tensor is read.

    Raises:
        UserError: the first that is missing or different.
    """
    for piece in pieces:
        entry = checkpoint.entry(_source(checkpoint, piece))
        check(entry.shape == piece.shape, "run.resume", checkpoint.location, f"has {piece.name} of shape {list(entry.shape)}, this run of {list(piece.shape)}; it is a checkpoint of another model")
        wide = piece.instead and piece.name not in checkpoint
        check(wide or entry.torch_dtype == piece.values.dtype, "run.resume", checkpoint.location,
              f"has {piece.name} in {entry.dtype}, this run holds it in {DTYPE_NAMES[piece.values.dtype]}; resume with the engine and the precision that wrote it")


def read_pieces(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Values of every piece on the CPU, each stored part read once and its hash checked; live memory is not touched.

    Raises:
        UserError: what `check_pieces` finds, or a missing or damaged file.
    """
    check_pieces(checkpoint, pieces)
    return checkpoint.read_boxes([(_source(checkpoint, piece), piece.box) for piece in pieces])


@torch.no_grad()
def fill(pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
    """Put what `read_pieces` read into its place."""
    for piece, value in zip(pieces, values, strict=True):
        piece.values.copy_(value)


def _source(checkpoint: Checkpoint, piece: Piece) -> str:
    return piece.instead if piece.instead and piece.name not in checkpoint else piece.name
