"""How layers fall into pipeline stages, and which layouts a model allows. No torch import: configurations are checked here.

Stages are cut anywhere, also inside an AttnRes block, and need not hold a MoE layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.model.config import ModelConfig
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.schedule import rows_sent, split_layers
from megamoe.utils.errors import check


@dataclass(frozen=True)
class StagePlan:
    """How layers fall into pipeline chunks.

    Attributes:
        layers: 0-based layers of every chunk, C = pp·vpp of them.
        rows_after: AttnRes rows finished when chunk c has run.
        num_ranks: pp.
    """

    layers: tuple[range, ...]
    rows_after: tuple[int, ...]
    num_ranks: int

    @property
    def num_chunks(self) -> int:
        return len(self.layers)

    def chunks_of(self, rank: int) -> list[int]:
        return list(range(rank, self.num_chunks, self.num_ranks))

    def rows_received(self, chunk: int) -> range:
        """Rows, by their number in the whole model, that are new to chunk's rank when it runs the chunk."""
        if chunk == 0:
            return range(0)
        known = self.rows_after[chunk - self.num_ranks] if chunk >= self.num_ranks else 0
        return range(known, self.rows_after[chunk - 1])

    def tensors_per_boundary(self, *, cached: bool = True) -> list[int]:
        """(T, D) tensors that travel forward over each boundary: rows, and the running sum."""
        return [rows + 1 for rows in rows_sent(self.rows_after, self.num_ranks, cached=cached)]

    def __str__(self) -> str:
        return " | ".join(f"{chunk % self.num_ranks}: {layers.start}–{layers.stop - 1}" for chunk, layers in enumerate(self.layers))


def layer_costs(config: ModelConfig, seq_len: int = 8192) -> tuple[list[float], float, float]:
    """Multiply-adds per token of every layer, of the embedding (none) and of head, loss and MTP.

    Attention scores count at half of `seq_len`, the causal average. Routed experts count as they are used, top_k of them.
    """
    D, kda, mla, moe = config.d_model, config.kda, config.mla, config.moe

    def attention(full: bool) -> float:
        if not full:
            gate = D * kda.width if kda.output_gate.name == "full" else (D + kda.width) * kda.head_dim
            state = 4 * kda.width * kda.head_dim
            return 4 * D * kda.width + (D + kda.width) * kda.head_dim + D * kda.num_heads + gate + state
        heads = mla.num_heads
        query = D * heads * mla.qk_head_dim if mla.q_lora_rank is None else mla.q_lora_rank * (D + heads * mla.qk_head_dim)
        latent = D * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        out = (1 + mla.output_gate) * D * heads * mla.v_head_dim
        return query + latent + out + heads * (mla.qk_head_dim + mla.v_head_dim) * seq_len / 2

    def ffn(sparse: bool) -> float:
        if not sparse:
            return 3 * D * config.ffn.dense_size
        width = D if moe.latent is None else moe.latent
        latent = 0 if moe.latent is None else 2 * D * moe.latent
        return D * moe.num_experts + latent + moe.top_k * 3 * width * moe.expert_size + 3 * D * moe.shared_size

    layers = [attention(config.is_full_attn(n)) + ffn(config.is_moe(n)) for n in range(config.num_layers)]
    head = D * config.vocab_size
    if config.mtp.num_layers:
        head += D * config.vocab_size + 2 * D * D + attention(True) + ffn(moe.first_dense_layers < config.num_layers)
    return layers, 0.0, float(head)


def plan_stages(config: ModelConfig, parallel: ParallelConfig, seq_len: int = 8192) -> StagePlan:
    """Cut the layers: as `parallel.stage_layers` says, else balanced by `layer_costs`.

    Raises:
        UserError: more chunks than layers, or a list that does not fit.
    """
    num_chunks = parallel.pp * parallel.vpp
    given: Sequence[int] = parallel.stage_layers
    if given:
        check(len(given) == num_chunks, "parallel.stage_layers", list(given), f"needs one number for each of the pp·vpp = {num_chunks} chunks")
        check(min(given) >= 1 and sum(given) == config.num_layers, "parallel.stage_layers", list(given),
              f"must be positive and sum to model.num_layers={config.num_layers}, not {sum(given)}")
        sizes = list(given)
    else:
        layers, first, last = layer_costs(config, seq_len)
        sizes = split_layers(layers, num_chunks, first=first, last=last)
    borders = [sum(sizes[:c]) for c in range(num_chunks + 1)]
    ranges = tuple(range(a, b) for a, b in zip(borders, borders[1:]))
    return StagePlan(ranges, tuple(config.bank_rows_before(b) for b in borders[1:]), parallel.pp)


def check_layout(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse a model that the layout cannot cut.

    Raises:
        UserError: the axis, and the sizes that would work.
    """
    _check_divides("tp", parallel.tp, "model.kda.num_heads", config.kda.num_heads)
    _check_divides("tp", parallel.tp, "model.mla.num_heads", config.mla.num_heads)
    _check_divides("tp", parallel.tp, "model.vocab_size", config.vocab_size)
    _check_divides("tp", parallel.tp, "model.ffn.dense_size", config.ffn.dense_size)
    if config.moe.first_dense_layers < config.num_layers:
        if config.moe.num_shared_experts:
            _check_divides("tp", parallel.tp, "moe.num_shared_experts·moe.expert_size", config.moe.shared_size)
        _check_divides("ep", parallel.ep, "model.moe.num_experts", config.moe.num_experts)
    check(parallel.pp * parallel.vpp <= config.num_layers, "parallel.pp·vpp", parallel.pp * parallel.vpp,
          f"the model has {config.num_layers} layers, and every chunk needs one; use at most {config.num_layers}")
    plan_stages(config, parallel)


def check_tokens(parallel: ParallelConfig, micro_batch_tokens: int, micro_batches: int) -> None:
    """Refuse micro-batches that the layout cannot share out.

    Raises:
        UserError: the key, and a number that would work.
    """
    parts = parallel.cp * parallel.tp
    check(micro_batch_tokens % parts == 0, "train.micro_batch_tokens", micro_batch_tokens,
          f"must be a multiple of cp·tp = {parts}; {max(1, micro_batch_tokens // parts) * parts} would work")
    check(parallel.vpp == 1 or micro_batches % parallel.pp == 0, "micro-batches per step", micro_batches,
          f"parallel.vpp={parallel.vpp} works in groups of pp={parallel.pp} micro-batches; use a multiple of {parallel.pp} (train.global_batch_tokens), or vpp=1")


def _check_divides(axis: str, size: int, what: str, value: int) -> None:
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    check(value % size == 0, f"parallel.{axis}", size, f"must divide {what}={value}; choose one of {', '.join(map(str, divisors))}")
