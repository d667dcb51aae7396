"""From document lengths to windows of seq_len, without reading a token.

A document of n tokens is presented as [eod] + tokens + [eod]: n+1 pairs (input, label). Pair j has the j-th presented
token as input and the next one as label. A document with more than seq_len pairs is cut into pieces; the token at a
cut is the label of one piece and the first input of the next, so each token is predicted exactly once.

Letters: P pieces, W windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megamoe.data.sampler import Permutation


@dataclass(frozen=True)
class PackingIndex:
    """Which pieces each window holds. Window w holds pieces piece_offset_W[w] … piece_offset_W[w+1] − 1, in that order.

    Attributes:
        document_P: (P,) int64, document of the piece.
        start_P: (P,) int64, first pair of the piece in its document.
        length_P: (P,) int32, pairs in the piece, at least 1.
        piece_offset_W: (W+1,) int64.
    """

    document_P: np.ndarray
    start_P: np.ndarray
    length_P: np.ndarray
    piece_offset_W: np.ndarray

    @property
    def num_windows(self) -> int:
        return len(self.piece_offset_W) - 1

    @property
    def num_pairs(self) -> int:
        """Targets over all windows, padding not counted."""
        return int(self.length_P.sum(dtype=np.int64))

    def save(self, folder: Path) -> None:
        """One .npy per field: unlike the members of an .npz, these can be mapped, and ranks of a host share the pages."""
        for f in fields(self):
            _save_array(folder / f"{f.name}.npy", np.ascontiguousarray(getattr(self, f.name)))

    @classmethod
    def load(cls, folder: Path) -> PackingIndex:
        return cls(**{f.name: np.load(folder / f"{f.name}.npy", mmap_mode="r") for f in fields(cls)})


def _save_array(path: Path, array: np.ndarray) -> None:
    """np.save, except that a full disk raises OSError with its errno: numpy's own writer raises one without."""
    with open(path, "wb") as f:
        np.lib.format.write_array_header_1_0(f, np.lib.format.header_data_from_array_1_0(array))
        f.write(memoryview(array).cast("B") if array.size else b"")


def pack_best_fit(pairs_n: np.ndarray, seq_len: int, *, seed: int, window_documents: int) -> PackingIndex:
    """Put each piece into the window with the least room that still holds it, longest pieces first.

    Documents are shuffled and packed `window_documents` at a time: within such a group no document that fits in a
    window is cut. The result is a pure function of the arguments. About one microsecond of Python per document.

    Args:
        pairs_n: (n,) integers, pairs per document; documents with 0 are left out.
        seq_len: pairs per window.
        seed: chooses the shuffle.
        window_documents: size of a group.
    """
    windows: list[np.ndarray] = []  # per group: (pieces, 4) columns document, start, length, window within the group
    num_windows = 0
    for group in _shuffled_groups(pairs_n, seed, window_documents):
        document, start, length = _cut(group, pairs_n[group], seq_len)
        full = length == seq_len
        window = np.empty(len(length), np.int64)
        window[full] = np.arange(np.count_nonzero(full))
        rest = np.flatnonzero(~full)
        rest = rest[np.argsort(-length[rest], kind="stable")]
        window[rest] = np.count_nonzero(full) + _best_fit(length[rest].tolist(), seq_len)
        windows.append(np.stack([document, start, length, window + num_windows], axis=1))
        num_windows += int(window.max()) + 1
    return _index_by_window(windows, num_windows)


def pack_concat(pairs_n: np.ndarray, seq_len: int, *, seed: int) -> PackingIndex:
    """Lay all shuffled documents end to end and cut every seq_len pairs. Full windows, and many cut documents.

    Arguments as in `pack_best_fit`.
    """
    order = next(_shuffled_groups(pairs_n, seed, max(1, len(pairs_n))), np.empty(0, np.int64))
    begin = np.concatenate([[0], np.cumsum(pairs_n[order], dtype=np.int64)])
    total = int(begin[-1])
    cuts = np.unique(np.concatenate([begin, np.arange(0, total + 1, seq_len, dtype=np.int64)]))
    piece_begin = cuts[:-1]
    rank = np.searchsorted(begin, piece_begin, side="right") - 1
    pieces = np.stack([order[rank], piece_begin - begin[rank], np.diff(cuts), piece_begin // seq_len], axis=1)
    return _index_by_window([pieces], -(-total // seq_len))


def _shuffled_groups(pairs_n: np.ndarray, seed: int, group_size: int) -> Iterator[np.ndarray]:
    """Ids of the documents that have pairs, shuffled, in groups."""
    documents = np.flatnonzero(pairs_n)
    if not len(documents):
        return
    shuffled = documents[Permutation(len(documents), seed, len(documents)).many(np.arange(len(documents)))]
    for begin in range(0, len(shuffled), group_size):
        yield shuffled[begin : begin + group_size]


def _cut(documents: np.ndarray, pairs: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, length) of every piece; all pieces of a document but the last hold seq_len pairs."""
    num_pieces = -(-pairs // seq_len)
    document = np.repeat(documents, num_pieces)
    first_piece = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = (np.arange(len(document)) - first_piece) * seq_len
    return document, start, np.minimum(seq_len, np.repeat(pairs, num_pieces) - start)


def _best_fit(lengths: list[int], seq_len: int) -> np.ndarray:
    """Window of each piece, for pieces sorted from long to short; windows are numbered as they are opened."""
    # Bit r of `rooms` says that some open window has exactly r positions left, so "least room that is enough" is the
    # lowest set bit above the piece's length: a few machine instructions per 64 possible rooms, and no search tree.
    rooms = 0
    windows_with_room: dict[int, list[int]] = {}
    chosen = np.empty(len(lengths), np.int64)
    opened = 0
    for piece, length in enumerate(lengths):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            stack = windows_with_room[room]
            window = stack.pop()
            if not stack:
                rooms ^= 1 << room
        else:
            room, window = seq_len, opened
            opened += 1
        chosen[piece] = window
        left = room - length
        if left:
            windows_with_room.setdefault(left, []).append(window)
            rooms |= 1 << left
    return chosen


def _index_by_window(pieces: list[np.ndarray], num_windows: int) -> PackingIndex:
    """Sort pieces (document, start, length, window) by window, keeping their order inside one."""
    table = np.concatenate(pieces) if pieces else np.empty((0, 4), np.int64)
    table = table[np.argsort(table[:, 3], kind="stable")]
    offsets = np.searchsorted(table[:, 3], np.arange(num_windows + 1))
    return PackingIndex(
        document_P=np.ascontiguousarray(table[:, 0]),
        start_P=np.ascontiguousarray(table[:, 1]),
        length_P=table[:, 2].astype(np.int32),
        piece_offset_W=offsets.astype(np.int64),
    )
