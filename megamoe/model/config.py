"""What a model is made of: the `model` group of the configuration. Sections of single layers are in `layers/config.py`.

No torch here; types stay within what OmegaConf 2.3 can hold. Checks that need two sections sit in `ModelConfig`, where
they meet.

Numbers and names follow the released configuration; layer lists are 1-based there and here, layer indices in code are
0-based (`is_full_attn`, `is_moe` do the translation, nobody else).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from megamoe.layers.config import Activation, Balancing, FFNConfig, GateKind, KDAConfig, MLAConfig, MoEConfig, OutputGate, QAT, RopeKind, require

__all__ = [
    "Activation", "AttnResKind", "Balancing", "FFNConfig", "GateKind", "KDAConfig", "MLAConfig", "ModelConfig", "MoEConfig",
    "MTPConfig", "OutputGate", "QAT", "RopeKind",
]  # fmt: skip


class AttnResKind(Enum):
    """How a sublayer's input is made from what came before: attention over depth, or the plain residual sum."""

    block = "block"  # one row per block of `attn_res_block_size` layers, and the running sum
    full = "full"  # one row per sublayer
    off = "off"  # plain residual stream. In YAML write "off" with quotes: bare off is a boolean


@dataclass
class MTPConfig:
    """Multi-token prediction: one extra backbone block that predicts the token after next through the shared head."""

    num_layers: int = 0
    loss_weight: float = 0.1

    def __post_init__(self) -> None:
        require(self.num_layers in (0, 1), "mtp.num_layers", self.num_layers, "use 0 (off) or 1")
        require(self.loss_weight >= 0 and math.isfinite(self.loss_weight), "mtp.loss_weight", self.loss_weight, "use a finite number >= 0")


@dataclass
class ModelConfig:
    """The whole text model. `name` is what run folders and checkpoints remember it by."""

    name: str = "tiny"
    vocab_size: int = 4096
    d_model: int = 128
    num_layers: int = 9
    full_attn_layers: list[int] = field(default_factory=lambda: [4, 8, 9])
    """1-based, as released: these layers are MLA, all others KDA."""
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tie_embeddings: bool = False
    attn_res: AttnResKind = AttnResKind.block
    attn_res_block_size: int = 3
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    ffn: FFNConfig = field(default_factory=FFNConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check what needs more than one section. Sections have checked themselves when they were built.

        Raises:
            ValueError: one line with the key, the value and the way out.
        """
        require(bool(self.name), "name", repr(self.name), "give the model a name: run folders and checkpoints remember it")
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "needs at least 2 tokens")
        require(self.d_model >= 1, "d_model", self.d_model, "needs a positive width")
        require(self.num_layers >= 1, "num_layers", self.num_layers, "needs at least 1 layer")
        require(self.norm_eps > 0 and math.isfinite(self.norm_eps), "norm_eps", self.norm_eps, "use a small positive number such as 1e-5")
        require(self.init_std > 0 and math.isfinite(self.init_std), "init_std", self.init_std, "use a positive number such as 0.02")
        require(self.attn_res_block_size >= 1, "attn_res_block_size", self.attn_res_block_size, 'needs at least 1 layer per block; attn_res="off" switches blocks off')
        layers = list(self.full_attn_layers)
        outside = [n for n in layers if not 1 <= n <= self.num_layers]
        require(not outside, "full_attn_layers", layers, f"layers are counted from 1 to num_layers={self.num_layers}; remove {outside} or raise num_layers")
        require(len(set(layers)) == len(layers), "full_attn_layers", layers, "names a layer twice; name each once")
        require(
            self.moe.first_dense_layers <= self.num_layers,
            "moe.first_dense_layers",
            self.moe.first_dense_layers,
            f"larger than num_layers={self.num_layers}; use at most {self.num_layers} (all dense)",
        )

        require(
            self.moe.qat is QAT.off or self.moe.latent is not None or self.d_model % 32 == 0,
            "d_model",
            self.d_model,
            f'moe.qat={self.moe.qat.name} rounds in groups of 32, and without moe.latent experts work in this width: use a multiple of 32, or moe.qat="off"',
        )

    def is_full_attn(self, layer: int) -> bool:
        """Whether 0-based `layer` is MLA (else KDA)."""
        return layer + 1 in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has a mixture of experts (else the dense MLP)."""
        return layer >= self.moe.first_dense_layers

    def opens_block(self, layer: int) -> bool:
        """Whether the AttnRes bank gets a row in front of 0-based `layer`'s attention."""
        if self.attn_res is AttnResKind.off:
            return False
        return self.attn_res is AttnResKind.full or layer % self.attn_res_block_size == 0

    def bank_rows_before(self, layer: int) -> int:
        """AttnRes rows that exist before 0-based `layer` runs (`num_layers`: at the output mix)."""
        if self.attn_res is AttnResKind.off:
            return 0
        if self.attn_res is AttnResKind.full:
            return 2 * layer
        return -(-layer // self.attn_res_block_size)
