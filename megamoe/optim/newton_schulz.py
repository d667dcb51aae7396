"""Newton–Schulz orthogonalisation of batches of matrices, the inner step of Muon.

Source of the iteration and of its coefficients: Muon as in arXiv:2502.16982. The twin to test against is the singular
value decomposition: the iteration moves every singular value towards one and leaves the singular vectors alone.
"""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(g_nrc: torch.Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Orthogonalise each matrix of a batch approximately.

    Args:
        g_nrc: (n, rows, cols), any float dtype.
        steps: iterations.
        eps: added to the Frobenius norm, so that a zero matrix gives a zero update (an idle expert's 0/0 would be NaN).
        dtype: dtype of the products; default that of `g_nrc`.

    Returns:
        (n, rows, cols) in the dtype of `g_nrc`, singular values near one where those of the input were not tiny.
    """
    a, b, c = COEFFICIENTS
    x = g_nrc / (g_nrc.norm(dim=(-2, -1), keepdim=True) + eps)
    x = x.to(dtype or g_nrc.dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if tall:
        x = x.mT
    return x.to(g_nrc.dtype)
