"""Give parameters their first values, the same ones on every layout.

Each parameter (each expert of a stack) draws from a generator of its own, seeded by (seed, logical name, expert id), on
the CPU and in fp32: a rank that holds a slice draws the whole tensor and keeps its slice, a rank that holds 2 of 16
experts draws 2. So tensor, expert and pipeline cuts, the device and the dtype change nothing, and adding a layer leaves
the others as they were.

    linear, embedding, experts, head     N(0, init_std)
    AttnRes queries                      0: every row weighs the same at first
    norm weights                         1
    router matrix                        U(-1/sqrt(D), 1/sqrt(D))    (kaiming-uniform, a = sqrt 5)
    convolutions                         U(-1/sqrt(W), 1/sqrt(W))    (the same rule, fan-in W)
    A_log                                0 (bounded gate);  log U(1, 16) (softplus gate)
    dt_bias                              inverse softplus of dt, log dt ~ U(log 1e-3, log 1e-1), dt >= 1e-4
    router biases, statistics            0
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from megamoe.layers.attn_res import AttnRes
from megamoe.layers.basic import GatedRMSNorm, RMSNorm, ShortConv
from megamoe.layers.kda import KDA
from megamoe.layers.router import Router
from megamoe.model.config import GateKind, ModelConfig
from megamoe.model.params import ParamInfo


@torch.no_grad()
def init_parameters(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill every parameter and buffer of `model` in place. Not for tensors on the meta device: `to_empty` first.

    Args:
        model: a `Transformer` or a part of one, on any device, in any dtype.
        seed: with the parameter's name it fixes the values, bit for bit before the cast to the parameter's dtype.

    No collective. Draws on the host: about a second per 100 million parameters.
    """
    queries = {id(module.proj.weight) for module in model.modules() if isinstance(module, AttnRes)}
    for module in model.modules():
        for p_name, p in module.named_parameters(recurse=False):
            if isinstance(module, (RMSNorm, GatedRMSNorm)):
                p.fill_(1.0)
            elif id(p) in queries:
                p.zero_()
            else:
                _fill(p, _rule(module, p_name, p, config), seed)
        if isinstance(module, Router):
            module.e_score_correction_bias.zero_()
            module.reset_stats()


def _rule(module: nn.Module, p_name: str, p: nn.Parameter, config: ModelConfig):
    """The function (tensor, generator) -> None that draws this parameter's values."""
    if isinstance(module, Router):
        return _uniform(config.d_model**-0.5)
    if isinstance(module, ShortConv):
        return _uniform(p.shape[-1] ** -0.5)
    if isinstance(module, KDA) and p_name == "A_log":
        return _zero if config.kda.gate is GateKind.bounded else _log_uniform_rate
    if isinstance(module, KDA) and p_name == "dt_bias":
        return _inverse_softplus_of_dt
    return lambda x, generator: x.normal_(0.0, config.init_std, generator=generator)


def _uniform(bound: float):
    return lambda x, generator: x.uniform_(-bound, bound, generator=generator)


def _zero(x: torch.Tensor, generator: torch.Generator) -> None:
    x.zero_()


def _log_uniform_rate(x: torch.Tensor, generator: torch.Generator) -> None:
    x.uniform_(1.0, 16.0, generator=generator).log_()


def _inverse_softplus_of_dt(x: torch.Tensor, generator: torch.Generator) -> None:
    dt = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=1e-4)
    x.copy_(dt + torch.log(-torch.expm1(-dt)))


def _fill(p: nn.Parameter, rule, seed: int) -> None:
    info: ParamInfo = p.megamoe
    if info.is_expert:
        for local, expert in enumerate(info.expert_ids):
            p[local].copy_(_draw(info.global_shape[1:], rule, seed, f"{info.name}.{expert}"))
        return
    whole = _draw(info.global_shape, rule, seed, info.name)
    p.copy_(whole[tuple(slice(start, start + size) for start, size in zip(info.offset, p.shape))])


def _draw(shape: tuple[int, ...], rule, seed: int, name: str) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    # manual_seed takes a signed 64-bit integer.
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little", signed=True))
    x = torch.empty(shape, dtype=torch.float32, device="cpu")
    rule(x, generator)
    return x
