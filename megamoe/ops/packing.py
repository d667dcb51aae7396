"""Where tokens of a packed stream belong. `cu_seqlens`: (n+1,) int32 document starts, cu[0] = 0, cu[-1] = T."""

from __future__ import annotations

import torch


def document_of_token(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T,) int64 document of each token. No host sync. Empty documents own no token."""
    token_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token_T, right=True)


def document_positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T,) int64 position of each token in its document. No host sync."""
    token_T = torch.arange(num_tokens, device=cu_seqlens.device)
    return token_T - cu_seqlens.long()[document_of_token(cu_seqlens, num_tokens)]
