"""A model small enough for float64 proofs that still has every part of the family."""

from __future__ import annotations

import torch

from megamoe.model.config import AttnResKind, FFNConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from megamoe.model.init import init_parameters
from megamoe.model.transformer import Transformer


def toy_config(**changes) -> ModelConfig:
    """5 layers (KDA, KDA, MLA, KDA, MLA), blocks of 2 layers, 6 experts of which 2 are used.

    Args:
        **changes: fields of ModelConfig, or of a section as `kda__gate=…`.
    """
    config = ModelConfig(
        name="toy", vocab_size=50, d_model=24, num_layers=5, full_attn_layers=[3, 5], init_std=0.2, attn_res=AttnResKind.block, attn_res_block_size=2,
        kda=KDAConfig(num_heads=2, head_dim=8),
        mla=MLAConfig(num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        ffn=FFNConfig(dense_size=32),
        moe=MoEConfig(num_experts=6, top_k=2, expert_size=10, latent=12, num_shared_experts=1),
        mtp=MTPConfig(num_layers=0),
    )  # fmt: skip
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        setattr(getattr(config, section) if section else config, key, value)
    config.validate()
    return config


def toy_model(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 1, jitter: float = 0.1, **kwargs) -> Transformer:
    """A `Transformer` with no parameter left at a special value: norms, queries and biases are moved off one and zero."""
    model = Transformer(config, **kwargs)
    init_parameters(model, config, seed=seed)
    model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            generator = torch.Generator().manual_seed(sum(p.megamoe.name.encode()))
            p.add_(jitter * torch.randn(p.shape, generator=generator))
    return model


def cu_seqlens(*lengths: int) -> torch.Tensor:
    """(n+1,) int32 document starts for documents of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
