"""The proof that a layout trains the model of one rank: two optimizer steps on both, everything compared.

`trace` runs on every rank of a layout and brings back loss, reduced gradients, norm, router biases and weights, each slice
with its place in the whole tensor. `compare` puts the slices of all ranks against the one-rank trace. Every rank's copy
counts: replicas that drift apart are a difference. So do bytes over a pipeline boundary that the plan did not foresee.

Two forms. `plain`: float64, so that 1e-10 leaves no room for anything but rounding. `deepspeed`: the engine that trains,
fp32, SGD with an active clip (AdamW would hide a wrong norm), 1e-6.

The data are made to hurt: documents of very different lengths that cross rank borders, masked tokens, a router that prefers
a few experts.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megamoe.data.batch import IGNORE_LABEL, Batch, Window, collate
from megamoe.layers.router import Router
from megamoe.model.config import FFNConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from megamoe.model.init import init_parameters
from megamoe.optim.config import OptimConfig, OptimizerKind, QKClipConfig
from megamoe.optim.optimizer import build_optimizer
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.distributed import process_group
from megamoe.parallel.mesh import build_mesh
from megamoe.parallel.offload import ActivationOffload
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.plan import build_stage
from megamoe.parallel.stages import plan_stages
from megamoe.testing.faults import FAULTS
from megamoe.testing.traffic import Boundary, boundaries
from megamoe.train.step import balance_routers, global_sum, own_counts

STEPS = 2
CLIP_NORM = 0.2
TOKENS = 48
# Of the per-head output norms in the shrunken model. At the first token of a document the output is one key-query product,
# which may be anything near zero; divided by its own size, fp32 noise would be all that is left of some gradients.
NORM_EPS = 1e-2
LIMITS = {"plain": 1e-10, "deepspeed": 1e-6}
# fp32 sums in another order: a tensor whose values are below this is compared absolutely.
FLOOR = {"plain": 1e-9, "deepspeed": 1e-2}


@dataclass(frozen=True)
class Case:
    """One layout to prove, with everything that may interact with it.

    Attributes:
        world: ranks.
        engine: `plain` (float64) or `deepspeed` (fp32).
        micro_batches: of the whole step, over all data-parallel ranks; 0 takes the smallest number from 4 up that fits.
        qk_tau: threshold of QK-clip; 0 leaves it off.
        offload: what layers save waits in another copy until backward asks for it.
        fault: a planted fault of `testing/faults.py`, or none. Never planted on one rank.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    world: int = 1
    engine: str = "plain"
    optimizer: OptimizerKind = OptimizerKind.muon
    recompute: str = "none"
    packing: bool = True
    micro_batches: int = 0
    fault: str = ""
    qk_tau: float = 0.0
    offload: bool = False

    @property
    def name(self) -> str:
        p, dp = self.parallel, self.parallel.resolve_dp(self.world)
        axes = [f"{axis}{size}" for axis, size in (("pp", p.pp), ("vpp", p.vpp), ("dp", dp), ("cp", p.cp), ("tp", p.tp), ("ep", p.ep)) if size > 1]
        return "·".join(axes) or "1 rank"

    @property
    def num_micro_batches(self) -> int:
        if self.micro_batches:
            return self.micro_batches
        unit = self.parallel.resolve_dp(self.world) * (self.parallel.pp if self.parallel.vpp > 1 else 1)
        return unit * -(-4 // unit)

    def one_rank(self) -> Case:
        """The same work on one rank. Always the plain engine: `deepspeed` is compared with it in fp32."""
        return replace(self, parallel=ParallelConfig(), world=1, recompute="none", offload=False, micro_batches=self.num_micro_batches, fault="")


def small_model(**changes: Any) -> ModelConfig:
    """A few thousand parameters with every kind of layer; `changes` are fields of `ModelConfig`."""
    fields = dict(
        name="proof", vocab_size=48, d_model=16, num_layers=5, full_attn_layers=[2, 5], attn_res_block_size=2,
        kda=KDAConfig(num_heads=4, head_dim=8, norm_eps=NORM_EPS),
        mla=MLAConfig(num_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
        ffn=FFNConfig(dense_size=24),
        moe=MoEConfig(num_experts=8, top_k=2, expert_size=8, latent=8, num_shared_experts=1, histogram_bins=50),
    )  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def make_batch(index: int, vocab_size: int, *, packing: bool) -> Batch:
    """Micro-batch `index`: a function of its number alone, so that any rank can make any of them."""
    rng = np.random.default_rng(1000 + index)
    starts = [0]
    while starts[-1] < TOKENS:
        starts.append(starts[-1] + (int(rng.choice([1, 2, 5, 9, 21, 40])) if packing else TOKENS // 2))
    starts = np.array([s for s in starts if s < TOKENS])
    labels = rng.integers(0, vocab_size, TOKENS)
    labels[rng.random(TOKENS) < 0.15] = IGNORE_LABEL
    return collate([Window(rng.integers(0, vocab_size, TOKENS), labels, starts, int((labels != IGNORE_LABEL).sum()))])


@torch.no_grad()
def stir(stage: torch.nn.Module) -> None:
    """Leave the neighbourhood of initial values, where zero queries and near-equal scores would hide faults.

    Activations come out near one, so that fp32 keeps its digits: through norms of tiny vectors it would lose them.
    """
    for p in stage.parameters():
        i = p.megamoe
        if i.name.endswith("_res_proj.weight"):
            p.copy_(torch.linspace(-0.1, 0.1, p.numel(), dtype=torch.float64).view_as(p))
        elif i.name.endswith("A_log"):
            whole = torch.linspace(-0.5, 0.5, i.global_shape[0], dtype=torch.float64)
            p.copy_(whole[i.offset[0] : i.offset[0] + p.shape[0]])
        elif i.name.endswith("embed_tokens.weight"):
            p.mul_(1 / 0.02)
        elif p.dim() >= 2 and not i.keep_wide and not i.name.endswith("gate.weight"):
            p.mul_(0.3 / (0.02 * i.global_shape[-1] ** 0.5))
    for module in stage.modules():
        if isinstance(module, Router):
            skew = torch.linspace(0.6, -0.6, module.e_score_correction_bias.numel(), dtype=torch.float64)
            module.e_score_correction_bias.copy_(skew - skew.mean())


def trace(case: Case) -> dict[str, Any]:
    """Train `STEPS` steps of a case on this rank. RANK, WORLD_SIZE and MASTER_* are in the environment. Collective."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    dtype = torch.float64 if case.engine == "plain" else torch.float32
    deepspeed = case.engine == "deepspeed" and case.world > 1
    with process_group(torch.device("cpu"), 60, deepspeed=deepspeed), FAULTS[case.fault]() as damage:
        # Importing DeepSpeed sets its logger's level.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        mesh = build_mesh(case.parallel)
        stage = build_stage(case.model, case.parallel, mesh, device="cpu", recompute=case.recompute)
        damage(stage, mesh)
        stage.to(dtype)
        init_parameters(stage, case.model, seed=7)
        stir(stage)
        stage.train()
        pipeline = Pipeline(stage, plan_stages(case.model, case.parallel), mesh, ActivationOffload(torch.device("cpu"), 1) if case.offload else None)
        config = OptimConfig(kind=case.optimizer, lr=0.05, clip_norm=CLIP_NORM, weight_decay=0.1, qk_clip=QKClipConfig(case.qk_tau))
        optimizer = build_optimizer(stage, config, mesh, deepspeed=deepspeed, bucket_elements=5000)
        out: dict[str, Any] = {"loss": [], "norm": [], "gradients": [], "weights": [], "bias": [], "qk_clip": []}
        for step in range(STEPS):
            first = step * case.num_micro_batches
            batches = [make_batch(first + i, case.model.vocab_size, packing=case.packing) for i in range(mesh.dp.rank, case.num_micro_batches, mesh.dp.size)]
            all_batches = [make_batch(first + i, case.model.vocab_size, packing=case.packing) for i in range(case.num_micro_batches)]
            num_tokens = sum(b.num_target_tokens for b in all_batches)
            optimizer.begin_step(step)
            assert own_counts(batches, mesh)[0] in (0, sum(b.num_target_tokens for b in batches))
            loss_sum = pipeline.step(batches, num_tokens=num_tokens, micro_batch=optimizer.micro_batch)
            out["loss"].append(global_sum(loss_sum, mesh) / num_tokens)
            norm = optimizer.reduce()
            if not deepspeed:
                for side in optimizer.sides.values():
                    out["gradients"] += [(step, _place(p), first, values.detach().clone()) for p, first, values in side.reduced_gradients()]
            out["norm"].append(optimizer.apply(0.05, norm).grad_norm)
            if optimizer.qk_clip:
                out["qk_clip"].append(optimizer.qk_clip.metrics())
            report = balance_routers(pipeline)
            if report is not None:
                # Counts too: a histogram that counts everything twice has the same quantiles.
                out["bias"].append(torch.cat([report.bias_LE.double(), report.count_LE.double()], 1))
        out["weights"] = [(_place(p), p.detach().clone()) for p in stage.parameters()]
        out["bytes_sent"] = pipeline.bytes_sent
        return out


def _place(p) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    i = p.megamoe
    return i.name, tuple(i.global_shape), tuple(i.offset), tuple(p.shape)


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one rank: relative differences, each the worst over ranks and steps.

    Attributes:
        bias: of router biases and of tokens counted per expert.
        gradient_name: the parameter whose gradient is furthest off. Through DeepSpeed gradients are seen in the weights.
        boundaries: bytes over every pipeline boundary. Counted ones that differ from the formula are a failure like any other.
    """

    case: Case
    loss: float
    gradient: float | None
    gradient_name: str
    norm: float
    bias: float
    weights: float
    weights_name: str
    boundaries: tuple[Boundary, ...] = ()

    @property
    def traffic(self) -> float:
        return max((b.off for b in self.boundaries), default=0.0)

    @property
    def worst(self) -> float:
        values = [self.loss, self.gradient or 0.0, self.norm, self.bias, self.weights, self.traffic]
        return max(float("inf") if v != v else v for v in values)

    @property
    def passed(self) -> bool:
        return self.worst <= LIMITS[self.case.engine]


def compare(case: Case, ranks: list[dict], one: dict) -> Verdict:
    """Every rank's trace against the one-rank trace."""
    floor = FLOOR[case.engine]

    def off(a: torch.Tensor, b: torch.Tensor) -> float:
        if a.numel() == 0:
            return 0.0
        value = (a.double() - b.double()).abs().max().item() / max(b.double().abs().max().item(), floor)
        return float("inf") if value != value else value

    def scalars(key: str) -> float:
        return max(abs(a - b) / abs(b) for r in ranks for a, b in zip(r[key], one[key], strict=True))

    wanted = {name: w for (name, *_), w in one["weights"]}
    weights = (0.0, "")
    for r in ranks:
        for (name, _, offset, shape), w in r["weights"]:
            weights = max(weights, (off(w, wanted[name][_box(offset, shape)]), name))
    gradient: tuple[float, str] | None = None
    if any(r["gradients"] for r in ranks):
        reference = _assemble([one])
        assert set(_assemble(ranks)) == set(reference), "a gradient is missing on this layout"
        # The floor: gradients far below the largest of the step are rounding of larger sums.
        largest = max(g.abs().max().item() for g in reference.values())
        for key, g in _assemble(ranks).items():
            b = reference[key]
            value = (g - b).abs().max().item() / max(b.abs().max().item(), 1e-3 * largest)
            gradient = max(gradient or (0.0, ""), (float("inf") if value != value else value, key[1]))
    E = case.model.moe.num_experts
    pairs = [(a, b) for r in ranks for a, b in zip(r["bias"], one["bias"], strict=True)]
    bias = max((off(a[:, part], b[:, part]) for a, b in pairs for part in (slice(0, E), slice(E, None))), default=0.0)
    sent = boundaries(case, ranks, tokens=TOKENS, steps=STEPS, itemsize=8 if case.engine == "plain" else 4)
    return Verdict(case, scalars("loss"), gradient and gradient[0], gradient[1] if gradient else "(seen in the weights)", scalars("norm"), bias, *weights, sent)


def _assemble(ranks: list[dict]) -> dict[tuple[int, str], torch.Tensor]:
    """Whole gradients by (step, name) out of the flat pieces that ranks own. What nobody owns stays NaN."""
    whole: dict[tuple[int, str], torch.Tensor] = {}
    locals_: dict[tuple, torch.Tensor] = {}
    for r in ranks:
        for step, (name, shape, offset, here), first, values in r["gradients"]:
            local = locals_.setdefault((step, name, shape, offset, here), torch.full((int(np.prod(here)),), float("nan"), dtype=torch.float64))
            local[first : first + values.numel()] = values
    for (step, name, shape, offset, here), local in locals_.items():
        target = whole.setdefault((step, name), torch.full(shape, float("nan"), dtype=torch.float64))
        target[_box(offset, here)] = local.view(here)
    return whole


def _box(offset, shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


class Prover:
    """Proves cases one after another; one-rank traces are made once for all cases that share them.

    Args:
        run: (fn, world_size, *args) -> results, such as `RankPool.run`.
    """

    def __init__(self, run: Callable[..., list[Any]], timeout_s: float = 300):
        self.run, self.timeout_s = run, timeout_s
        self._one: dict[str, dict] = {}

    def prove(self, case: Case) -> Verdict:
        """Raises RuntimeError when a rank raises or hangs."""
        return self.prove_with_traces(case)[0]

    def prove_with_traces(self, case: Case) -> tuple[Verdict, list[dict]]:
        base = case.one_rank()
        key = repr(base)
        if key not in self._one:
            self._one[key] = self.run(trace, 1, base, timeout_s=self.timeout_s)[0]
        ranks = self.run(trace, case.world, case, timeout_s=self.timeout_s)
        return compare(case, ranks, self._one[key]), ranks
