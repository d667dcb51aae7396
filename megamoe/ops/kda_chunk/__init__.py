"""Kimi Delta Attention over a packed stream: the contract, its validation, and the list of backends.

    kda = choose("kda_chunk", K=128, V=128, gate="bounded")      # once, when a layer is built
    o_THV, final_NHKV = kda(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H=..., dt_bias_HK=..., cu_seqlens=...)

What the op computes, for one head and token t of a document (S starts at the document's initial state, or zero):

    q <- q / sqrt(sum(q²) + 1e-6) · scale        k <- k / sqrt(sum(k²) + 1e-6)
    z  = g + dt_bias;  g <- lower_bound · sigmoid(exp(A_log) · z)        ("bounded")
                       g <- -exp(A_log) · softplus(z)                    ("softplus", the Kimi Linear form)
    β <- sigmoid(β)
    S  = Diag(exp g) S;   S = S + β k (v - Sᵀk)ᵀ;   o = Sᵀq

Source: Kimi Linear (arXiv:2510.26692) and the Kimi K3 report (arXiv:2607.24653, sec. 2.1.1) for the bounded gate; code ours.
Backends, in order of preference: `cuda` (csrc/kda_chunk, sm_90), `fla` (flash-linear-attention), `reference` (plain PyTorch).
"""

from __future__ import annotations

import functools
import importlib

import torch

from megamoe.ops.registry import choose, register

GATES = ("bounded", "softplus")
L2_EPS = 1e-6
CHUNK = 64
TILE = 16
# Steepest decay that 16-row tiles anchored at their first row carry in fp32 and bf16 alike: 15 rows · 5 nats = 75 < 88.
STEEPEST_LOWER_BOUND = -5.0


def kda_chunk(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    *,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor | None = None,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    initial_state_NHKV: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over a packed stream, by the best backend for these inputs.

    Layers choose their backend once with `choose("kda_chunk", ...)`; this function is for scripts and tests.

    Args:
        q_THK, k_THK: (T, H, K), after convolution and SiLU, NOT normalised.
        v_THV: (T, H, V).
        g_THK: (T, H, K). Decay logits without dt_bias.
        beta_TH: (T, H). Write-strength logits.
        A_log_H: (H,) log-scale of the gate. Added up in fp32 (float64 when q is float64), like everything below.
        dt_bias_HK: (H, K), or None for zero.
        gate: `bounded` or `softplus`; two different functions, not two ranges of one (see the module's docstring).
        lower_bound: of the bounded gate, in [-5, 0). Ignored by `softplus`.
        scale: of q; None means K**-0.5.
        cu_seqlens: (N+1,) int32 document starts, cu[0]=0, cu[-1]=T; empty documents are allowed. None: one document.
            Its values are checked by the reference only: checking on a GPU would sync the host.
        initial_state_NHKV: (N, H, K, V) fp32, or None for zero.
        output_final_state: also return the state after each document.

    Returns:
        o_THV: (T, H, V) in v's dtype.
        final_state_NHKV: (N, H, K, V) fp32 (float64 when q is float64), or None. An empty document returns its
            initial state.

    Differentiable in q, k, v, g, beta, A_log, dt_bias and the initial state, from both outputs.

    Raises:
        ValueError: a shape, dtype, gate or bound outside the above, naming the argument and its value.

    Collectives: none. Host syncs: none with `cuda`; `reference` reads cu_seqlens on the host.
    Twin of every backend: reference.py (`kda_recurrent` is the literal recurrence).
    """
    backend = _backend_for(q_THK.device.type, q_THK.dtype, q_THK.shape[-1], v_THV.shape[-1], gate, torch.is_grad_enabled())
    return backend(
        q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H=A_log_H, dt_bias_HK=dt_bias_HK, gate=gate, lower_bound=lower_bound,
        scale=scale, cu_seqlens=cu_seqlens, initial_state_NHKV=initial_state_NHKV, output_final_state=output_final_state,
    )  # fmt: skip


@functools.cache
def _backend_for(device: str, dtype: torch.dtype, K: int, V: int, gate: str, training: bool):
    return choose("kda_chunk", K=K, V=V, gate=gate, device=device, dtype=dtype, training=training)


def validate(q_THK, k_THK, v_THV, g_THK, beta_TH, A_log_H, dt_bias_HK, gate, lower_bound, cu_seqlens, initial_state_NHKV):
    """Check the contract without touching the device; every backend calls this first. Returns (T, H, K, V, N)."""
    if q_THK.dim() != 3 or v_THV.dim() != 3:
        raise ValueError(f"kda_chunk: q {tuple(q_THK.shape)} and v {tuple(v_THV.shape)} must be (T, H, width): pack the batch into one stream and pass cu_seqlens")
    T, H, K = q_THK.shape
    V = v_THV.shape[-1]
    expected = {
        "k": (k_THK, (T, H, K)), "v": (v_THV, (T, H, V)), "g": (g_THK, (T, H, K)), "beta": (beta_TH, (T, H)),
        "A_log": (A_log_H, (H,)), "dt_bias": (dt_bias_HK, (H, K)),
    }  # fmt: skip
    for name, (tensor, shape) in expected.items():
        if tensor is None and name == "dt_bias":
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kda_chunk: {name} has shape {tuple(tensor.shape)}, expected {shape} from q {tuple(q_THK.shape)} and v {tuple(v_THV.shape)}")
    for name, tensor in (("q", q_THK), ("k", k_THK), ("v", v_THV), ("g", g_THK), ("beta", beta_TH)):
        if not tensor.is_floating_point():
            raise ValueError(f"kda_chunk: {name} has dtype {tensor.dtype}, expected a floating dtype: cast it before the call")
        if (tensor.dtype == torch.float64) != (q_THK.dtype == torch.float64):
            raise ValueError(f"kda_chunk: {name} is {tensor.dtype} while q is {q_THK.dtype}: pass all of q, k, v, g, beta in float64, or none")
    if gate not in GATES:
        raise ValueError(f"kda_chunk: gate={gate!r} is unknown; choose one of {', '.join(GATES)}")
    if gate == "bounded" and not STEEPEST_LOWER_BOUND <= lower_bound < 0.0:
        raise ValueError(f"kda_chunk: lower_bound={lower_bound} is outside [{STEEPEST_LOWER_BOUND}, 0): 16-row tiles would overflow; use gate='softplus' for an unbounded gate")
    N = 1
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype != torch.int32:
            raise ValueError(f"kda_chunk: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected int32 (N+1,) with at least one document")
        N = cu_seqlens.numel() - 1
    if initial_state_NHKV is not None and tuple(initial_state_NHKV.shape) != (N, H, K, V):
        raise ValueError(f"kda_chunk: initial_state has shape {tuple(initial_state_NHKV.shape)}, expected {(N, H, K, V)}: one state per document")
    return T, H, K, V, N


def _backend(name: str, function: str):
    """A function of a backend module, imported at its first use: importing the contract must not import Triton or FLA."""

    def call(*args, **kwargs):
        return getattr(importlib.import_module(f"{__name__}.{name}"), function)(*args, **kwargs)

    return call


def _load_reference():
    from megamoe.ops.kda_chunk.reference import kda_chunk as reference

    return reference


register("kda_chunk", "cuda", load=_backend("cuda", "load"), why_not=_backend("cuda", "why_not"))
register("kda_chunk", "fla", load=_backend("fla", "load"), why_not=_backend("fla", "why_not"))
register("kda_chunk", "reference", load=_load_reference)
