"""What each kind of layer is made of, as typed dataclasses: sections of the `model` group of the configuration.

No torch here: `launch/pretrain.py --help` and a typing error must answer before torch has been imported. Types stay
within what OmegaConf 2.3 can hold (int, float, bool, str, Enum, Optional, list, nested dataclasses).

Each section checks itself when it is built, in one line that names the key, the value and the way out. The defaults are
the `tiny` model's, so that every section is valid by itself. `model/config.py` nests them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Optional

from megamoe.utils.errors import check


class GateKind(Enum):
    """The decay gate of KDA. Two different functions, not one with a clamp: weights do not carry over."""

    bounded = "bounded"  # lower_bound * sigmoid(exp(A_log) * z)
    softplus = "softplus"  # -exp(A_log) * softplus(z), the Kimi-Linear form


class OutputGate(Enum):
    """How KDA's output gate is produced from the layer input."""

    full = "full"  # one matrix
    lowrank = "lowrank"  # two matrices through head_dim, the Kimi-Linear form


class RopeKind(Enum):
    """What is done to the `qk_rope_head_dim` part of MLA's queries and keys."""

    none = "none"  # nothing: ordinary content dims (NoPE)
    rotary = "rotary"
    linear = "linear"  # rotary, positions divided by rope_factor (position interpolation)
    yarn = "yarn"  # rotary, interpolated by wavelength, with YaRN's temperature


class Activation(Enum):
    """The gated activation of every FFN and expert."""

    situ = "situ"
    silu = "silu"


class Balancing(Enum):
    """The rule that moves the router's selection bias between steps."""

    quantile = "quantile"  # histogram over the whole global batch, replaces the bias
    sign = "sign"  # bias += sign_rate * sign(mean load - load)
    threshold = "threshold"  # -step / +step / 0 from the previous batch's softmax load, never accumulated
    none = "none"


class Placement(Enum):
    """Where the rows of a routed expert are computed."""

    fixed = "fixed"  # at the rank that owns the expert
    balanced = "balanced"  # every rank computes equally many rows; hot experts' weights are lent for one micro-batch


class QAT(Enum):
    """What routed experts are trained for. Masters stay as they are; gradients pass the rounding unchanged."""

    off = "off"  # nothing is rounded. In YAML write "off" with quotes: bare off is a boolean
    mxfp4 = "mxfp4"  # weights rounded to MXFP4, the inputs of both products to MXFP8


def require(ok: bool, key: str, value: object, way_out: str) -> None:
    """`check` for a key of the model group. NaN fails every comparison, so write `ok` positively."""
    check(ok, f"model.{key}", value, way_out)


@dataclass
class KDAConfig:
    """Kimi Delta Attention. Keys and values have the same head width."""

    num_heads: int = 4
    head_dim: int = 32
    conv_kernel: int = 4
    gate: GateKind = GateKind.bounded
    lower_bound: float = -5.0
    """Lowest log-decay per token of the bounded gate; ignored by the softplus gate."""
    output_gate: OutputGate = OutputGate.full
    norm_eps: float = 1e-5
    """Of the per-head output norm. The L2 norm of q and k has its own 1e-6, inside the op."""
    backend: str = "auto"

    def __post_init__(self) -> None:
        require(self.num_heads >= 1, "kda.num_heads", self.num_heads, "needs at least 1 head")
        require(self.head_dim >= 1, "kda.head_dim", self.head_dim, "needs a positive width, 128 for the fast kernels")
        require(self.conv_kernel >= 1, "kda.conv_kernel", self.conv_kernel, "needs at least 1 tap; the family uses 4")
        require(self.norm_eps > 0 and math.isfinite(self.norm_eps), "kda.norm_eps", self.norm_eps, "use a small positive number such as 1e-5")
        if self.gate is GateKind.bounded:
            require(
                -5.0 <= self.lower_bound < 0.0,
                "kda.lower_bound",
                self.lower_bound,
                "must be >= -5 (16 rows of decay have to fit fp32's exponent) and < 0; use -5.0, or kda.gate=softplus for an unbounded gate",
            )

    @property
    def width(self) -> int:
        """Channels of q, k, v and of the output gate."""
        return self.num_heads * self.head_dim


@dataclass
class MLAConfig:
    """Multi-head latent attention with an output gate."""

    num_heads: int = 4
    q_lora_rank: Optional[int] = 64
    """null projects queries straight from the layer input (Kimi-Linear)."""
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    output_gate: bool = True
    rope: RopeKind = RopeKind.none
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    """linear and yarn: how many times longer than `original_max_seq_len` the context is."""
    original_max_seq_len: int = 8192
    """yarn: the context for which the unscaled frequencies were trained."""
    norm_eps: float = 1e-6
    """Of the two inner norms; every other RMSNorm uses `model.norm_eps`."""
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            require(getattr(self, name) >= 1, f"mla.{name}", getattr(self, name), "needs at least 1")
        require(self.q_lora_rank is None or self.q_lora_rank >= 1, "mla.q_lora_rank", self.q_lora_rank, "needs at least 1, or null for a direct query projection")
        require(self.qk_rope_head_dim >= 0, "mla.qk_rope_head_dim", self.qk_rope_head_dim, "cannot be negative; 0 leaves the shared key out")
        require(self.norm_eps > 0 and math.isfinite(self.norm_eps), "mla.norm_eps", self.norm_eps, "use a small positive number such as 1e-6")
        if self.rope is RopeKind.none:
            return
        require(
            self.qk_rope_head_dim >= 2 and self.qk_rope_head_dim % 2 == 0,
            "mla.qk_rope_head_dim",
            self.qk_rope_head_dim,
            f"rope={self.rope.name} rotates pairs: use an even number >= 2, or rope=none",
        )
        require(self.rope_theta > 1 and math.isfinite(self.rope_theta), "mla.rope_theta", self.rope_theta, "use a number above 1, such as 10000")
        require(self.rope_factor >= 1 and math.isfinite(self.rope_factor), "mla.rope_factor", self.rope_factor, "use new context / original context, at least 1")
        require(self.original_max_seq_len >= 1, "mla.original_max_seq_len", self.original_max_seq_len, "use the context length of the original training")

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the per-head part, then the part whose key all heads share."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass
class FFNConfig:
    """The gated MLP: dense layers directly, experts and shared experts through `moe`."""

    act: Activation = Activation.situ
    dense_size: int = 384
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    def __post_init__(self) -> None:
        require(self.dense_size >= 1, "ffn.dense_size", self.dense_size, "needs a positive width")
        for name in ("situ_beta", "situ_linear_beta"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"ffn.{name}", value, "needs a positive bound; for an unbounded activation use ffn.act=silu")


@dataclass
class MoEConfig:
    """Stable LatentMoE: router, routed experts in the latent width, shared experts in the model width."""

    num_experts: int = 16
    top_k: int = 2
    expert_size: int = 64
    latent: Optional[int] = 64
    """Width in which routed experts work; null means the model width and no latent projections (Kimi-Linear)."""
    latent_norm: bool = True
    num_shared_experts: int = 1
    """Run as one MLP of width num_shared_experts * expert_size; 0 leaves it out."""
    first_dense_layers: int = 1
    routed_scaling_factor: float = 1.0
    balancing: Balancing = Balancing.quantile
    histogram_bins: int = 1000
    sign_rate: float = 1e-3
    threshold_step: float = 0.1
    threshold_high: float = 1.2
    threshold_low: float = 0.8
    placement: Placement = Placement.fixed
    qat: QAT = QAT.off
    shared_stream: bool = False
    """On a GPU, run shared experts on a second stream beside dispatch and routed experts. Changes no bit."""
    dispatch: str = "auto"
    """auto, cuda, reference: rows travel by all_to_all_single. cuda_ipc: ranks of one host write into each other's GPU memory.
    hierarchical: that within a host, one all-to-all between hosts. shared_memory: cuda_ipc's twin for CPU ranks of one host."""
    grouped_mlp: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_size"):
            require(getattr(self, name) >= 1, f"moe.{name}", getattr(self, name), "needs at least 1")
        require(self.top_k <= self.num_experts, "moe.top_k", self.top_k, f"larger than moe.num_experts={self.num_experts}; use at most {self.num_experts}")
        # The rule reads the (k+1)-th biased score of every token as its cutoff: with k = E there is none.
        require(
            self.balancing is not Balancing.quantile or self.top_k < self.num_experts,
            "moe.top_k",
            self.top_k,
            f"balancing=quantile needs one expert to be left out, moe.num_experts={self.num_experts}; use at most {self.num_experts - 1}, or balancing=none",
        )
        require(
            self.placement is Placement.fixed or self.dispatch not in ("cuda_ipc", "shared_memory", "hierarchical"),
            "moe.dispatch",
            self.dispatch,
            "placement=balanced lends experts over all_to_all_single; use dispatch=auto, or placement=fixed",
        )
        require(self.latent is None or self.latent >= 1, "moe.latent", self.latent, "needs at least 1, or null for experts in the model width")
        for name in ("expert_size", "latent"):
            width = getattr(self, name)
            require(self.qat is QAT.off or width is None or width % 32 == 0, f"moe.{name}", width, f'moe.qat={self.qat.name} rounds in groups of 32: use a multiple of 32, or moe.qat="off"')
        require(self.num_shared_experts >= 0, "moe.num_shared_experts", self.num_shared_experts, "cannot be negative; 0 leaves the shared expert out")
        require(self.first_dense_layers >= 0, "moe.first_dense_layers", self.first_dense_layers, "cannot be negative; 0 makes every layer MoE")
        require(self.histogram_bins >= 2, "moe.histogram_bins", self.histogram_bins, "needs at least 2 bins; the family uses 1000")
        for name in ("routed_scaling_factor", "sign_rate", "threshold_step"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"moe.{name}", value, "needs a positive finite number")
        require(
            0 <= self.threshold_low < self.threshold_high and math.isfinite(self.threshold_high),
            "moe.threshold_low",
            self.threshold_low,
            f"must lie below moe.threshold_high={self.threshold_high}; the rule's own numbers are 0.8 and 1.2",
        )

    @property
    def shared_size(self) -> int:
        """Width of the fused shared-expert MLP."""
        return self.num_shared_experts * self.expert_size
