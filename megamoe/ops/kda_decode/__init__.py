"""One decode step of Kimi Delta Attention: a token of each of B sequences against its recurrent state.

    decode = choose("kda_decode", K=128, V=128, gate="bounded")      # once, when a layer or an engine is built
    o_BHV = decode(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, A_log_H=..., dt_bias_HK=..., slots_B=...)

The function is `kda_chunk`'s on documents of one token, with the state updated where it lies: an engine that batches
continuously keeps one pool of states and says which row belongs to which sequence.
Backends, in order of preference: `cuda` (csrc/kda_decode), `reference` (plain PyTorch).
"""

from __future__ import annotations

import functools
import importlib

import torch

from megamoe.ops import kda_chunk
from megamoe.ops.registry import choose, register

OP = "kda_decode"


def kda_decode(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    state_SHKV: torch.Tensor,
    *,
    A_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor | None = None,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    scale: float | None = None,
    slots_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step by the best backend for these inputs. An engine chooses its backend once with `choose("kda_decode", ...)`.

    Args:
        q_BHK, k_BHK: (B, H, K), after convolution and SiLU, NOT normalised.
        v_BHV: (B, H, V). g_BHK: (B, H, K) decay logits without dt_bias. beta_BH: (B, H) write-strength logits.
        state_SHKV: (S, H, K, V) fp32 (float64 when q is float64), contiguous. Updated IN PLACE.
        A_log_H, dt_bias_HK, gate, lower_bound, scale: as `kda_chunk`.
        slots_B: (B,) int32, row of the pool of each sequence, all different; below 0: no sequence, its o is zero. None:
            sequence b has row b, and S >= B. Rows are checked by the reference only: checking on a GPU would sync the host.

    Returns: o_BHV in v's dtype.

    Raises:
        ValueError: a shape, dtype, gate or bound outside the above, naming the argument and its value.

    No gradient flows: it is for generation. Collectives: none. Host syncs: none with `cuda`, which a CUDA graph can capture.
    A sequence's bits do not depend on the rest of the batch. Twin: reference.py.
    """
    backend = _backend_for(q_BHK.device.type, q_BHK.dtype, q_BHK.shape[-1], v_BHV.shape[-1], gate)
    return backend(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, A_log_H=A_log_H, dt_bias_HK=dt_bias_HK, gate=gate, lower_bound=lower_bound, scale=scale, slots_B=slots_B)


@functools.cache
def _backend_for(device: str, dtype: torch.dtype, K: int, V: int, gate: str):
    return choose(OP, K=K, V=V, gate=gate, device=device, dtype=dtype)


def validate(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_SHKV, A_log_H, dt_bias_HK, gate, lower_bound, slots_B) -> None:
    """Check the contract without touching the device; every backend calls this first."""
    try:
        B, H, K, V, _ = kda_chunk.validate(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, A_log_H, dt_bias_HK, gate, lower_bound, None, None)
    except ValueError as error:
        raise ValueError(str(error).replace("kda_chunk", "kda_decode")) from None
    wide = torch.float64 if q_BHK.dtype == torch.float64 else torch.float32
    if state_SHKV.dim() != 4 or tuple(state_SHKV.shape[1:]) != (H, K, V) or not state_SHKV.is_contiguous():
        raise ValueError(f"kda_decode: state has shape {tuple(state_SHKV.shape)}, expected a contiguous (S, {H}, {K}, {V}): it is updated in place")
    if state_SHKV.dtype != wide:
        raise ValueError(f"kda_decode: state is {state_SHKV.dtype}, expected {wide}: a state in fewer bits drifts")
    if slots_B is None:
        if state_SHKV.shape[0] < B:
            raise ValueError(f"kda_decode: {B} sequences and {state_SHKV.shape[0]} states: pass a state for each, or slots")
    elif slots_B.dtype != torch.int32 or tuple(slots_B.shape) != (B,):
        raise ValueError(f"kda_decode: slots is {slots_B.dtype} {tuple(slots_B.shape)}, expected int32 ({B},)")


def _backend(name: str, function: str):
    def call(*args, **kwargs):
        return getattr(importlib.import_module(f"{__name__}.{name}"), function)(*args, **kwargs)

    return call


def _load_reference():
    from megamoe.ops.kda_decode.reference import kda_decode as reference

    return reference


register(OP, "cuda", load=_backend("cuda", "load"), why_not=_backend("cuda", "why_not"))
register(OP, "reference", load=_load_reference)
