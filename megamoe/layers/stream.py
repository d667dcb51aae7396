"""The one token layout: a packed stream of documents, and what every layer may ask about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.ops.packing import document_positions


@dataclass(frozen=True)
class Stream:
    """Where documents lie in a micro-batch of T tokens. Made once per micro-batch, passed to every layer.

    Attributes:
        cu_seqlens: (n+1,) int32 document starts, cu[0] = 0, cu[-1] = T; empty documents allowed.
        positions_T: (T,) int64 position of each token in its document. Only rotary MLA reads it.
        token_mask_T: (T,) bool, False for padding, or None when every token is real. Padding is routed to no expert and
            counted in no balancing statistic. It must form documents of its own, or come last in its document.
        max_seqlen: host integer, at least the longest document; lets GPU attention size its grid without a sync.
    """

    cu_seqlens: torch.Tensor
    positions_T: torch.Tensor
    token_mask_T: torch.Tensor | None = None
    max_seqlen: int | None = None

    @staticmethod
    def build(
        num_tokens: int,
        cu_seqlens: torch.Tensor,
        *,
        positions_T: torch.Tensor | None = None,
        token_mask_T: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Stream:
        """Check the facts that need no host sync and fill in the positions.

        Raises:
            ValueError: a dtype or a length that does not fit `num_tokens`.
        """
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens={cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: needs int32 document starts, (n+1,) with n >= 1")
        for name, x in (("positions_T", positions_T), ("token_mask_T", token_mask_T)):
            if x is not None and tuple(x.shape) != (num_tokens,):
                raise ValueError(f"{name}: has shape {tuple(x.shape)}, expected ({num_tokens},) like the tokens")
        if positions_T is None:
            positions_T = document_positions(cu_seqlens, num_tokens)
        if token_mask_T is not None:
            token_mask_T = token_mask_T.bool()
        return Stream(cu_seqlens, positions_T, token_mask_T, max_seqlen)

