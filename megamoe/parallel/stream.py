"""Which part of a micro-batch each rank works on.

    whole stream      T tokens           every rank of a (pp, cp, tp) block reads the same micro-batch
    cp slice          T / cp             contiguous; what attention sees, after the tp gather
    shard             T / cp / tp        contiguous in the slice; residual stream, norms, AttnRes, router, experts

Documents are cut where slices are cut. A slice knows the documents that reach into it, in order, and whether its first one
started earlier and its last one goes on: all on the host, because document starts come from the host (`Batch`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.layers.stream import Stream
from megamoe.parallel.mesh import Axis, Mesh
from megamoe.utils.errors import check


@dataclass(frozen=True)
class Slice:
    """One contiguous part of a packed stream.

    Attributes:
        start, stop: tokens of the stream.
        documents: (first, end) in the stream of each document that has a token here, uncut, in order.
    """

    start: int
    stop: int
    documents: tuple[tuple[int, int], ...]

    @staticmethod
    def of(starts: list[int], start: int, stop: int) -> Slice:
        """The slice [start, stop) of the stream whose document starts are `starts` (with the stream's end last)."""
        pairs = zip(starts, starts[1:])
        return Slice(start, stop, tuple((a, b) for a, b in pairs if a < stop and b > start and a < b))

    @property
    def continues_from_before(self) -> bool:
        """Whether the first document here started on an earlier slice."""
        return bool(self.documents) and self.documents[0][0] < self.start

    @property
    def continues_after(self) -> bool:
        """Whether the last document here goes on in a later slice."""
        return bool(self.documents) and self.documents[-1][1] > self.stop

    @property
    def one_document(self) -> bool:
        """Whether one document fills the slice and reaches beyond it on both sides."""
        return len(self.documents) == 1 and self.continues_from_before and self.continues_after

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """(n+1,) int32 starts of the documents here, counted from the slice's first token."""
        inner = [a - self.start for a, _ in self.documents[1:]]
        return torch.tensor([0, *inner, self.stop - self.start], dtype=torch.int32, device=device)

    def positions(self, device: torch.device) -> torch.Tensor:
        """(T,) int64 position of each token in its document, earlier slices counted."""
        parts = [torch.arange(max(a, self.start) - a, min(b, self.stop) - a, device=device) for a, b in self.documents]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class ShardedStream(Stream):
    """A `Stream` as one rank of a layout sees it.

    The inherited `cu_seqlens`, `positions_T` and `max_seqlen` describe the cp slice, `token_mask_T` the shard.

    Attributes:
        cp: the axis the stream is cut over.
        slices: the slices of all cp ranks.
    """

    cp: Axis = Axis()
    slices: tuple[Slice, ...] = ()

    @property
    def mine(self) -> Slice:
        return self.slices[self.cp.rank]

    @property
    def crossed(self) -> bool:
        """Whether any document reaches over a border: else no layer has anything to exchange. The same on every rank."""
        return any(s.continues_after for s in self.slices)


def check_divides(num_tokens: int, mesh: Mesh) -> None:
    """Raises UserError: a micro-batch that cp·tp ranks cannot share evenly."""
    parts = mesh.cp.size * mesh.tp.size
    check(num_tokens % parts == 0, "train.micro_batch_tokens", num_tokens, f"must be a multiple of cp·tp = {parts}; {max(1, num_tokens // parts) * parts} would work")


def slice_range(num_tokens: int, mesh: Mesh) -> tuple[int, int]:
    """(start, stop) of this rank's cp slice in the stream."""
    size = num_tokens // mesh.cp.size
    return mesh.cp.rank * size, (mesh.cp.rank + 1) * size


def shard_range(num_tokens: int, mesh: Mesh) -> tuple[int, int]:
    """(start, stop) of this rank's shard in the stream."""
    start, stop = slice_range(num_tokens, mesh)
    size = (stop - start) // mesh.tp.size
    return start + mesh.tp.rank * size, start + (mesh.tp.rank + 1) * size


def shard_stream(num_tokens: int, cu_seqlens: torch.Tensor, mesh: Mesh, *, device: torch.device, token_mask_T: torch.Tensor | None = None) -> ShardedStream:
    """The stream of a micro-batch as this rank sees it.

    Args:
        cu_seqlens: (n+1,) int32 of the whole stream. On the CPU; a device tensor syncs the host.
        token_mask_T: (T,) bool of the whole stream, False for padding, or None.

    Raises:
        UserError: T is not a multiple of cp·tp.
    """
    check_divides(num_tokens, mesh)
    starts, size = cu_seqlens.tolist(), num_tokens // mesh.cp.size
    slices = tuple(Slice.of(starts, r * size, (r + 1) * size) for r in range(mesh.cp.size))
    mine = slices[mesh.cp.rank]
    if token_mask_T is not None:
        token_mask_T = token_mask_T[slice(*shard_range(num_tokens, mesh))].to(device)
    longest = max((min(b, mine.stop) - max(a, mine.start) for a, b in mine.documents), default=1)
    return ShardedStream(mine.cu_seqlens(device), mine.positions(device), token_mask_T, longest, mesh.cp, slices)
