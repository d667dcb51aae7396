"""Windows and micro-batches: the packed stream that every layer reads.

Letters: T tokens of a micro-batch, n documents in it (a padding run and a piece of a cut document count as one each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

IGNORE_LABEL = -100


@dataclass(frozen=True)
class Window:
    """One training sample of exactly seq_len positions, on the host.

    Attributes:
        tokens: (seq_len,) int64. Documents one after another, then padding.
        labels: (seq_len,) int64. The token that follows each position in its document; -100 on padding.
        starts: (n,) int64, strictly increasing, starts[0] = 0. First position of each document and of the padding.
        num_bytes: bytes of text that the labels stand for.
    """

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    num_bytes: int


@dataclass
class Batch:
    """One micro-batch as a packed stream.

    A plain batch of B sequences of S tokens is the case cu_seqlens = 0, S, 2S, … B·S. Context-parallel ranks take
    contiguous slices of `tokens_T`, `labels_T` and `positions_T`; `cu_seqlens` always describes the whole stream.

    Attributes:
        tokens_T: (T,) int64.
        labels_T: (T,) int64, -100 where no loss is taken.
        positions_T: (T,) int64, position inside the document, 0 at every entry of cu_seqlens.
        cu_seqlens: (n+1,) int32, document starts, cu_seqlens[0] = 0, cu_seqlens[-1] = T. Every window border and every
            document border is in it; padding is a document of its own.
        num_target_tokens: labels that are not -100. A Python integer: reading it costs no host sync.
        num_bytes: bytes of text that those labels stand for (end of document stands for none).
        max_document_tokens: longest document in the stream, for kernels that size their grid by it.
    """

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens: torch.Tensor
    num_target_tokens: int
    num_bytes: int
    max_document_tokens: int

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.tokens_T.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch with its tensors on `device`. Asynchronous when the tensors are pinned."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory. Needs a CUDA device."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, fn) -> Batch:
        return Batch(
            tokens_T=fn(self.tokens_T),
            labels_T=fn(self.labels_T),
            positions_T=fn(self.positions_T),
            cu_seqlens=fn(self.cu_seqlens),
            num_target_tokens=self.num_target_tokens,
            num_bytes=self.num_bytes,
            max_document_tokens=self.max_document_tokens,
        )


def collate(windows: Sequence[Window]) -> Batch:
    """Lay windows one after another in one packed stream.

    Args:
        windows: at least one. Their lengths may differ.

    Returns:
        A batch on the CPU with T = the sum of the windows' lengths. Documents never join across a window border.

    Raises:
        ValueError: no windows, or a stream that int32 offsets cannot address.
    """
    if not windows:
        raise ValueError("collate needs at least one window and got none")
    tokens_T = np.concatenate([w.tokens for w in windows]).astype(np.int64, copy=False)
    labels_T = np.concatenate([w.labels for w in windows]).astype(np.int64, copy=False)
    num_tokens = len(tokens_T)
    if num_tokens > np.iinfo(np.int32).max:
        raise ValueError(f"a micro-batch of {num_tokens} tokens does not fit in int32 offsets; use fewer windows per micro-batch")
    offsets = np.cumsum([0] + [len(w.tokens) for w in windows])
    starts = np.concatenate([w.starts + offset for w, offset in zip(windows, offsets)])
    cu_seqlens = np.append(starts, num_tokens).astype(np.int32)
    lengths = np.diff(cu_seqlens)
    positions_T = np.arange(num_tokens, dtype=np.int64) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        labels_T=torch.from_numpy(labels_T),
        positions_T=torch.from_numpy(positions_T),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        num_target_tokens=int(np.count_nonzero(labels_T != IGNORE_LABEL)),
        num_bytes=sum(w.num_bytes for w in windows),
        max_document_tokens=int(lengths.max()),
    )
