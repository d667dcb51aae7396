"""Train four full-width K3 layers on one GPU as one rank of an EP-8 job would, and say how fast and where the time goes.

    python tools/bench_slice.py                                  d 7168, 96 heads, 3 KDA + 1 MLA, 112 experts, 8 x 8192 tokens
    python tools/bench_slice.py --recompute attention --json out.json
    python tools/bench_slice.py --width tiny --device cpu --tokens 64            the same program in seconds

The model is `Transformer` as a middle pipeline stage: no vocabulary, the residual stream and `--bank` finished rows come in,
a random gradient comes back. Experts are those of one rank and the router chooses among them. Gradients of every weight are
kept in fp32 (Muon's buffer; the experts' products add into it); masters and momentum, and hence the update, are those of
owner 0 of `--owners`, as ZeRO-1 over so many ranks leaves them. No collective runs: nothing here says what a network costs.

Model FLOPs: `megamoe/model/flops.py`. The update is inside the step's time and not in its FLOPs. Weights are drawn on the
device, not by `init_parameters` (which takes minutes for 17 billion).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megamoe.layers.balance import update_router_biases
from megamoe.layers.basic import GatedRMSNorm, RMSNorm
from megamoe.layers.stream import Stream
from megamoe.model.config import FFNConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from megamoe.model.flops import ParamCounts, flops_per_token
from megamoe.model.transformer import Transformer
from megamoe.ops.registry import status
from megamoe.optim.config import OptimConfig, OptimizerKind
from megamoe.optim.muon import Muon
from megamoe.optim.optimizer import Optimizer, split_parameters, torch_optimizer
from megamoe.parallel.engine import PlainEngine
from megamoe.parallel.mesh import Axis
from megamoe.utils.errors import check

PEAK_TFLOPS = 989.0  # dense bf16 of an H100/H200 SXM
GIB = 2**30

# First match wins. A group is what a reader would try to make faster as one thing.
GROUPS = (
    ("experts: weight gradients into fp32", r"^d_weight"),
    ("experts: forward and row gradients", r"^(up|nt|d_hidden|d_rows|zero_rest|plan)$"),
    ("KDA core", r"kda"),
    ("MLA core", r"flash|fmha|attention"),
    ("AttnRes mix", r"attn_res"),
    ("dispatch and combine", r"dispatch::|send_kernel|combine_kernel|send_weighted|expand_kernel|zero_rest_kernel"),
    ("routing, slots, histogram", r"routing::|count_chunks|scan_chunks|place_|route|histogram"),
    ("dense products", r"nvjet|gemm|cublas|cutlass|wgmma|splitK"),
    ("short convolutions", r"conv"),
    ("norms and gates", r"norm"),
    ("SiTU-GLU", r"situ|glu|^act"),
    ("copies, casts, sums, fills", r"elementwise|Memcpy|Memset|copy|fill|cat|reduce"),
)


def slice_config(width: str, experts: int) -> ModelConfig:
    """Four layers of the released model's block, the fourth full attention; `tiny` keeps the shape and shrinks the widths."""
    if width == "tiny":
        return ModelConfig(
            name="slice-tiny", d_model=64, num_layers=4, full_attn_layers=[4], attn_res_block_size=12, kda=KDAConfig(num_heads=2, head_dim=32), mla=MLAConfig(num_heads=2),
            moe=MoEConfig(num_experts=experts, top_k=2, expert_size=32, latent=32, num_shared_experts=2, first_dense_layers=0),
        )  # fmt: skip
    return ModelConfig(
        name="k3-slice", d_model=7168, num_layers=4, full_attn_layers=[4], attn_res_block_size=12,
        kda=KDAConfig(num_heads=96, head_dim=128),
        mla=MLAConfig(num_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        ffn=FFNConfig(dense_size=33792),
        moe=MoEConfig(num_experts=experts, top_k=16, expert_size=3072, latent=3584, num_shared_experts=2, first_dense_layers=0),
    )  # fmt: skip


class OneOwner(Muon):
    """Muon as owner 0 of an axis whose other ranks are not here: their gradients are kept, their weights never move."""

    @torch.no_grad()
    def publish(self) -> None:
        """Write the owned masters into their weights; the other owners' would arrive by all-gather."""
        for u in self.mine:
            self._weight(u).copy_(self._view(self.master_flat, u))


class Slice:
    """Model, optimizer and inputs of the bench.

    Args:
        tokens: of a micro-batch, one document.
        owners: ranks over which optimizer state is spread; this is number 0.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, tokens: int, bank: int, owners: int, recompute: str, dtype: torch.dtype = torch.bfloat16):
        self.config, self.device, self.tokens, self.num_bank = config, device, tokens, bank
        self.dtype = dtype
        with torch.device("meta"):
            model = Transformer(config, recompute=recompute, embed=False, head=False)
        records = {path: p.megamoe for path, p in model.named_parameters()}
        wide = {path for path, info in records.items() if info.keep_wide}
        model.to(dtype=dtype).to_empty(device=device)
        for path, p in model.named_parameters():
            p.megamoe = records[path]
            assert (path in wide) == (p.dtype == torch.float32) or dtype == torch.float32, path
        torch.manual_seed(0)
        _fill(model, config.init_std)
        self.model = model.train()
        settings = OptimConfig(kind=OptimizerKind.muon)
        groups, matrices = split_parameters(list(model.parameters()), settings.kind, settings.weight_decay)
        axis = Axis(owners, 0, tuple(range(owners)), None)
        # bf16 products of Newton-Schulz, as build_optimizer asks for on a GPU.
        ns_dtype = torch.bfloat16 if device.type == "cuda" else None
        muon = OneOwner(matrices, axis, momentum=settings.muon_momentum, ns_steps=settings.muon_ns_steps, weight_decay=settings.weight_decay, ns_dtype=ns_dtype)
        engine = PlainEngine(groups, torch_optimizer(settings, device), Axis())
        self.muon, self.optimizer = muon, Optimizer({"stage": engine}, {"stage": muon}, settings.clip_norm, Axis())
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.stream = Stream.build(tokens, cu, max_seqlen=tokens)
        self.rows = [torch.randn(tokens, config.d_model, device=device).to(dtype) for _ in range(bank + 1)]
        # As a loss that is a mean over the step's tokens would give: small against the weights, never zero.
        self.d_out = (torch.randn(tokens, config.d_model, device=device) / tokens).to(dtype)

    def micro_batch(self) -> None:
        """Forward and backward of one micro-batch; the incoming rows get gradients, as at a stage border."""
        rows = [row.detach().requires_grad_() for row in self.rows]
        with self.optimizer.micro_batch():
            bank, prefix = self.model.run_layers(tuple(rows[:-1]), rows[-1], self.stream)
            torch.autograd.backward([prefix, *bank], [self.d_out] * (1 + len(bank)))

    def step(self, micro_batches: int, lr: float = 1e-4):
        """One training step. Syncs the host once, for the norm. Returns the balance report."""
        for _ in range(micro_batches):
            self.micro_batch()
        update = self.optimizer.step(lr)
        assert not update.skipped, f"gradient norm {update.grad_norm}: the step was skipped"
        return update, update_router_biases(self.model)

    def model_flops(self) -> dict[str, float]:
        """Per micro-batch: matrices, KDA core, MLA core."""
        params = list(self.model.parameters())
        routed = sum(p.numel() for p in params if p.megamoe.is_expert)
        total, moe = sum(p.numel() for p in params), self.config.moe
        counts = ParamCounts(total, 0, 0, 0, routed, total - routed + routed * moe.top_k // moe.num_experts)
        f = flops_per_token(self.config, counts, (self.tokens + 1) / 2)
        return {"matrices": f.matrices * self.tokens, "KDA core": f.kda_core * self.tokens, "MLA core": f.mla_core * self.tokens}

    def memory_on_paper(self) -> dict[str, float]:
        """GiB that stay resident: what has to fit before the first activation."""
        params = list(self.model.parameters())
        return {
            "weights": sum(p.numel() * p.element_size() for p in params) / GIB,
            "fp32 gradients": self.muon.grad_flat.numel() * 4 / GIB,
            "masters and momentum of one owner": 2 * self.muon.part_numel * 4 / GIB,
            "incoming rows": sum(r.numel() * r.element_size() for r in self.rows) / GIB,
        }


@torch.no_grad()
def _fill(model: torch.nn.Module, std: float) -> None:
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, (RMSNorm, GatedRMSNorm)):
                p.fill_(1.0)
            elif name == "A_log":
                p.zero_()
            elif name == "dt_bias":
                p.uniform_(-6.9, -2.2)
            elif p.megamoe.name.endswith("conv1d.weight"):
                p.uniform_(-0.5, 0.5)
            else:
                p.normal_(0.0, std)
        for name, b in module.named_buffers(recurse=False):
            b.zero_()


def gemm_ceiling() -> float:
    """TFLOP/s of a bf16 product 8192^3 in this run, median of 15."""
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = []
    for i in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x @ y
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * 8192**3 / sorted(times[5:])[7] / 1e9


def trace(run, say) -> list[dict]:
    """Kernel time of one call by group, and the largest kernels; times on the device, gaps are the rest of the span."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        span_ms = (time.perf_counter() - begin) * 1e3
    kernels = [(k.key, k.self_device_time_total / 1e3, k.count) for k in traced.key_averages() if k.self_device_time_total > 0]
    groups: dict[str, float] = {}
    for name, ms, _ in kernels:
        group = next((g for g, pattern in GROUPS if re.search(pattern, name)), "other")
        groups[group] = groups.get(group, 0.0) + ms
    busy = sum(groups.values())
    say(f"kernels {busy:.1f} ms of {span_ms:.1f} ms")
    rows = []
    for group, ms in sorted(groups.items(), key=lambda g: -g[1]):
        say(f"  {ms:9.2f} ms {ms / busy:6.1%}  {group}")
        rows.append({"group": group, "ms": ms, "share": ms / busy})
    say("largest kernels")
    for name, ms, count in sorted(kernels, key=lambda k: -k[1])[:32]:
        say(f"  {ms:9.2f} ms {count:5d}x  {name[:130]}")
        rows.append({"kernel": name, "ms": ms, "count": count})
    return rows


def run_slice(args, say) -> dict:
    """Build, warm up, time, trace. Returns what `--json` writes."""
    cuda = args.device == "cuda"
    sync = torch.cuda.synchronize if cuda else lambda: None
    result: dict = {"args": vars(args), "torch": torch.__version__}
    if cuda:
        result |= {"gpu": torch.cuda.get_device_name(), "gemm_tflops": gemm_ceiling()}
        torch.cuda.empty_cache()
        say(f"{result['gpu']}: bf16 product 8192^3 at {result['gemm_tflops']:.0f} TFLOP/s")
    s = Slice(slice_config(args.width, args.experts), device=torch.device(args.device), tokens=args.tokens, bank=args.bank, owners=args.owners, recompute=args.recompute, dtype=torch.bfloat16 if cuda else torch.float32)
    result["params"] = sum(p.numel() for p in s.model.parameters())
    result["memory_gib"] = s.memory_on_paper()
    result["model_flops"] = s.model_flops()
    flops = sum(result["model_flops"].values()) * args.micro_batches
    say(f"{result['params'] / 1e9:.2f} B parameters; resident GiB: " + ", ".join(f"{k} {v:.1f}" for k, v in result["memory_gib"].items()))
    say("model TFLOP a micro-batch: " + ", ".join(f"{k} {v / 1e12:.1f}" for k, v in result["model_flops"].items()))
    begin = time.perf_counter()
    for i in range(args.warm):
        # The first step balances the router: its routing is that of random weights.
        _, report = s.step(1 if i == 0 else args.micro_batches)
        sync()
        say(f"warm-up step {i}: {time.perf_counter() - begin:.1f} s since the start, MaxVio {report.max_vio_L.max().item():.2f}")
    for choice in status():
        say(f"  {choice.op}: {choice.backend}")
    result["ops"] = {choice.op: choice.backend for choice in status()}
    steps = []
    for _ in range(args.steps):
        sync()
        begin = time.perf_counter()
        for _ in range(args.micro_batches):
            s.micro_batch()
        sync()
        middle = time.perf_counter()
        update = s.optimizer.step(1e-4)
        report = update_router_biases(s.model)
        sync()
        end = time.perf_counter()
        assert not update.skipped, f"gradient norm {update.grad_norm}: the step was skipped"
        steps.append((end - begin, middle - begin, end - middle))
        say(f"step {end - begin:.3f} s (micro-batches {middle - begin:.3f}, update {end - middle:.3f}), {flops / (end - begin) / 1e12:.1f} model TFLOP/s, norm {update.grad_norm:.3g}, MaxVio {report.max_vio_L.max().item():.3f}")
    total, forward_backward, update_s = sorted(steps)[len(steps) // 2]
    result |= {"step_s": total, "micro_batches_s": forward_backward, "update_s": update_s, "model_tflops": flops / total / 1e12}
    if cuda:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        result["mfu_989"] = result["model_tflops"] / PEAK_TFLOPS
        result["of_gemm_ceiling"] = result["model_tflops"] / result["gemm_tflops"]
        say(f"median: {result['model_tflops']:.1f} model TFLOP/s, MFU {result['mfu_989']:.1%} of {PEAK_TFLOPS:.0f}, {result['of_gemm_ceiling']:.1%} of the measured product; peak {result['peak_gib']:.1f} GiB")
        say("one micro-batch by trace:")
        result["trace_micro_batch"] = trace(s.micro_batch, say)
        say("one update by trace:")
        result["trace_update"] = trace(lambda: (s.optimizer.step(1e-4), update_router_biases(s.model)), say)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", choices=["k3", "tiny"], default="k3")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--experts", type=int, default=112)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--bank", type=int, default=4, help="finished AttnRes rows that come in: 4 is the middle of the model")
    parser.add_argument("--owners", type=int, default=16)
    parser.add_argument("--recompute", choices=["none", "attention", "experts", "full"], default="none")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check(args.device == "cpu" or torch.cuda.is_available(), "--device", args.device, "torch sees no GPU here; use --device cpu --width tiny --tokens 64")
    check(args.warm >= 1 and args.steps >= 1, "--warm, --steps", (args.warm, args.steps), "use at least 1 each: the first call compiles")
    result = run_slice(args, lambda line: print(line, flush=True))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
