"""Time the MoE and AttnRes kernels on one GPU against their bars, the plain path and torch's grouped_mm, in one run.

    python tools/bench_moe.py [attn] [routing] [dispatch] [elementwise] [grouped] [tiles] [plan] [layer] [--json out.json]
    python tools/bench_moe.py --precompile 3 16        compile the 3rd of 16 shares of the Triton variants, for parallel warm-up

Every figure is the median of event-timed calls on random data whose size is a multiple of the L2; the copy and the matrix
product of the same run are the ceilings beside it. `tiles` times each product of the grouped MLP under several tiles: the
measurement behind `megamoe.ops.grouped_mlp.triton.rules`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RESULTS: list[dict] = []
HEAD = f"{'what':58s} {'ms':>9s} {'rate':>16s}   of ceiling"
CEILING = {"TB/s": 0.0, "TFLOP/s": 0.0}


def time_ms(call, reps: int = 7) -> float:
    call()
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in events)[reps // 2]


def graph_ms(call, reps: int = 20) -> float:
    """Per replay of a captured call: what short kernels cost without the launches' host time."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_ms(graph.replay, reps)


def device_ms(call, reps: int = 5) -> float:
    """Sum of kernel times of one call: for ops whose host cost hides their kernels."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(reps):
            call()
        torch.cuda.synchronize()
    return sum(k.self_device_time_total for k in trace.key_averages()) / reps / 1e3


def report(what: str, ms: float, amount: float, unit: str, bar: str = "") -> None:
    """`amount`: bytes for TB/s, operations for TFLOP/s."""
    rate = amount / ms / 1e9
    share = f"{rate / CEILING[unit]:6.1%}" if CEILING[unit] else ""
    print(f"{what:58s} {ms:9.3f} {rate:8.2f} {unit:7s}   {share} {bar}", flush=True)
    RESULTS.append({"what": what, "ms": ms, "rate": rate, "unit": unit, "bar": bar})


def ceilings() -> None:
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_(256)
    b = torch.empty_like(a)
    ms = time_ms(lambda: b.copy_(a))
    CEILING["TB/s"] = 2 * a.numel() / ms / 1e9
    report("device-to-device copy, 4 GiB", ms, 2 * a.numel(), "TB/s")
    del a, b
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    ms = time_ms(lambda: x @ y)
    CEILING["TFLOP/s"] = 2 * 8192**3 / ms / 1e9
    report("bf16 matrix product 8192^3", ms, 2 * 8192**3, "TFLOP/s")


def attn(n: int = 9, T: int = 8192, D: int = 7168) -> None:
    from megamoe.ops.attn_res_mix import lean

    rows = [torch.randn(T, D, device="cuda").bfloat16() for _ in range(n)]
    query, weight, do = 0.05 * torch.randn(D, device="cuda"), torch.rand(D, device="cuda"), torch.randn(T, D, device="cuda").bfloat16()
    row = T * D * 2
    try:
        from megamoe.ops.attn_res_mix import cuda

        cuda.load()
        u = query * weight
        ops = torch.ops.megamoe
        _, rv = ops.attn_res_mix_fwd(rows, u, 1e-5)
        f = time_ms(lambda: ops.attn_res_mix_fwd(rows, u, 1e-5))
        b = time_ms(lambda: ops.attn_res_mix_bwd(do, rows, u, rv, 2**n - 1))
        report(f"attn_res cuda fwd {n}x{T}x{D}", f, (n + 1) * row, "TB/s")
        report(f"attn_res cuda bwd {n}x{T}x{D}", b, (2 * n + 1) * row, "TB/s")
        report(f"attn_res cuda fwd+bwd {n}x{T}x{D}", f + b, (3 * n + 2) * row, "TB/s", "bar 80% of copy")
    except ImportError as error:
        print("attn_res cuda left out:", error)
    try:
        from megamoe.ops.attn_res_mix import triton as kernels

        _, rv = kernels.mix_fwd(rows, query, weight, 1e-5)
        f = time_ms(lambda: kernels.mix_fwd(rows, query, weight, 1e-5))
        report(f"attn_res triton fwd {n}x{T}x{D}", f, (n + 1) * row, "TB/s")
        b = time_ms(lambda: kernels.mix_bwd(rows, query, weight, rv, do, [True] * n))
        report(f"attn_res triton bwd {n}x{T}x{D}", b, (2 * n + 1) * row, "TB/s")
    except ImportError as error:
        print("attn_res triton left out:", error)
    leaves = [r.requires_grad_() for r in rows]
    f = time_ms(lambda: lean.attn_res_mix(rows, query, weight), 3)
    both = time_ms(lambda: torch.autograd.grad(lean.attn_res_mix(rows, query, weight), leaves, do), 3)
    report("attn_res plain fwd", f, (n + 1) * row, "TB/s")
    report("attn_res plain fwd+bwd", both, (3 * n + 2) * row, "TB/s")


def routing(N: int = 8192, E: int = 896, A: int = 16, bins: int = 1000) -> None:
    from megamoe.ops.moe_route import cuda, reference

    cuda.load()
    ops = torch.ops.megamoe
    logits, bias = torch.randn(N, E, device="cuda"), 0.1 * torch.randn(E, device="cuda")
    idx, weight, cutoff, _ = ops.moe_route(logits, bias, None, A, 1.0, False)
    total, chunk, rank = ops.moe_count(idx, E)
    parts = {
        "scores, top-(k+1), weights, counts": lambda: ops.moe_route(logits, bias, None, A, 1.0, False),
        f"required-bias histogram, {bins} bins": lambda: ops.moe_histogram(logits, bias, cutoff, None, bins),
        "slot count": lambda: ops.moe_count(idx, E),
        "slot placement": lambda: ops.moe_place(idx, weight, total[None], 0, chunk, rank),
    }
    for name, call in parts.items():
        report(f"routing {N}x{E}: {name} (graph)", graph_ms(call), N * E * 4, "TB/s")

    def whole():
        idx, weight, cutoff, _ = ops.moe_route(logits, bias, None, A, 1.0, False)
        ops.moe_histogram(logits, bias, cutoff, None, bins)
        total, chunk, rank = ops.moe_count(idx, E)
        return ops.moe_place(idx, weight, total[None], 0, chunk, rank)

    report(f"routing {N}x{E}: all of it (graph)", graph_ms(whole), N * E * 4, "TB/s", "bar 0.150 ms")
    report(f"routing {N}x{E}: all of it (eager)", time_ms(whole), N * E * 4, "TB/s")
    report("routing plain twin (without placement)", time_ms(lambda: reference.route(logits, bias, top_k=A, bins=bins), 3), N * E * 4, "TB/s")


def dispatch(N: int = 8192, E: int = 896, A: int = 16, D: int = 3584) -> None:
    from megamoe.ops.moe_dispatch import cuda, reference

    cuda.load()
    ops = torch.ops.megamoe
    idx = torch.rand(N, E, device="cuda").topk(A, dim=1).indices
    weight, x = torch.rand(N, A, device="cuda"), torch.randn(N, D, device="cuda").bfloat16()
    s, _ = cuda.place(idx, weight, E)
    rows, d_rows = (torch.empty(N * A, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    wide, narrow = N * A * D * 2, N * D * 2
    report("dispatch: pack rows", time_ms(lambda: ops.moe_send(x, s.row_NA, s.owner_NA, [rows], [])), wide + narrow, "TB/s", "bar 3.5")
    report("dispatch: zero_rest with nothing to do", time_ms(lambda: ops.moe_zero_rest(rows, s.received)), 0, "TB/s")
    report("combine: weighted sum", time_ms(lambda: ops.moe_combine([rows], s.row_NA, s.owner_NA, s.weight_NA)), wide + narrow, "TB/s", "bar 3.5")
    weighted = lambda: ops.moe_send_weighted(x, [rows], [d_rows], s.row_NA, s.owner_NA, s.weight_NA, s.source_NA)  # noqa: E731
    report("combine backward: scatter and weight gradient", time_ms(weighted), 2 * wide + narrow, "TB/s", "bar 3.5")
    h = reference.dispatch(x, idx, weight, group=None, num_experts=E)[2]
    report("plain dispatch", time_ms(lambda: reference.dispatch(x, idx, weight, group=None, num_experts=E), 3), wide + narrow, "TB/s")
    report("plain combine", time_ms(lambda: h.combine(rows), 3), wide + narrow, "TB/s")


def elementwise(T: int = 8192, D: int = 7168, H: int = 96) -> None:
    from megamoe.ops.rms_norm import reference as norm_plain
    from megamoe.ops.rms_norm import triton as norm
    from megamoe.ops.short_conv import reference as conv_plain
    from megamoe.ops.short_conv import triton as conv
    from megamoe.ops.situ_glu import reference as glu_plain
    from megamoe.ops.situ_glu import triton as glu

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, device="cuda").to(dtype).requires_grad_()

    cu = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    x, w, heads, gate = random(T, D), random(D), random(T, H, 128), random(T, H, 128)
    w_head, taps, wide = random(128, dtype=torch.float32), random(H * 128, 1, 4, dtype=torch.float32), random(T, H * 128)
    # name, fast, plain, leaves, tensors read and written forward and backward (least)
    cases = [
        (f"rms_norm {T}x{D}", norm.rms_norm, norm_plain.rms_norm, (x, w), dict(eps=1e-5), 2, 3),
        (f"gated_rms_norm {T}x{H}x128", norm.gated_rms_norm, norm_plain.gated_rms_norm, (heads, w_head, gate), dict(eps=1e-5), 3, 5),
        (f"situ_glu {T}x{H * 128}", glu.gated_activation, glu_plain.gated_activation, (heads, gate), dict(act="situ"), 3, 5),
        (f"short_conv {T}x{H * 128}", conv.short_conv, conv_plain.short_conv, (wide, taps), dict(cu_seqlens=cu), 2, 3),
    ]
    for name, fast, plain, leaves, kwargs, fwd, bwd in cases:
        size = leaves[0].numel() * 2
        for label, op in (("triton", fast), ("plain", plain)):
            first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
            f = device_ms(lambda: op(*leaves, **kwargs))
            dout = torch.randn_like(first(op(*leaves, **kwargs)))
            both = device_ms(lambda: torch.autograd.grad(first(op(*leaves, **kwargs)), leaves, dout))
            report(f"{name} {label} fwd", f, fwd * size, "TB/s")
            report(f"{name} {label} fwd+bwd", both, (fwd + bwd) * size, "TB/s")


def experts(E: int, per: int, D: int, F: int):
    torch.manual_seed(0)
    x = torch.randn(E * per, D, device="cuda").bfloat16()
    ws = [torch.empty(E, *s, device="cuda", dtype=torch.bfloat16).normal_(std=s[1] ** -0.5) for s in ((F, D), (F, D), (D, F))]
    return x, torch.full((E,), per, dtype=torch.int32, device="cuda"), ws


def uneven(E: int, R: int) -> torch.Tensor:
    """Counts with a 4:1 spread that sum to R; the largest remainder goes to the last."""
    share = torch.linspace(0.4, 1.6, E, dtype=torch.float64)
    count = (share / share.sum() * R).floor().int()
    count[-1] += R - count.sum()
    return count[torch.randperm(E, generator=torch.Generator().manual_seed(0))].cuda()


def grouped() -> None:
    from megamoe.ops.grouped_mlp import grouped_mm, reference, triton

    for E, per, D, F, bars in ((112, 1170, 3584, 3072, ("bar 480", "bar 450")), (896, 146, 3584, 3072, ("bar 330", ""))):
        x, count, ws = experts(E, per, D, F)
        flop = 6 * E * per * D * F
        leaves = [t.requires_grad_() for t in (x, *ws)]
        dout = torch.randn_like(x)
        counts = {"even": count} if E > 500 else {"even": count, "uneven": uneven(E, E * per)}
        for name, op in (("triton", triton.grouped_mlp), ("torch grouped_mm + act", grouped_mm.grouped_mlp), ("loop of products", reference.grouped_mlp)):
            if name == "loop of products" and E > 500:
                continue
            for kind, c in counts.items():
                with torch.no_grad():
                    f = time_ms(lambda: op(x, c, *ws, act="situ"), 5)
                report(f"grouped mlp {E}x{per} {kind} {name} fwd", f, flop, "TFLOP/s", bars[0])
                if E < 500:
                    both = time_ms(lambda: torch.autograd.grad(op(x, c, *ws, act="situ"), leaves, dout), 3)
                    report(f"grouped mlp {E}x{per} {kind} {name} fwd+bwd", both, 3 * flop, "TFLOP/s", bars[1])
        if E < 500:
            for w in ws:
                w.main_grad = torch.zeros(w.shape, device="cuda")
            both = time_ms(lambda: triton.grouped_mlp(x, count, *ws, act="situ").backward(dout), 3)
            report(f"grouped mlp {E}x{per} even triton fwd+bwd into fp32 main grads", both, 3 * flop, "TFLOP/s")
        del x, ws, leaves, dout
        torch.cuda.empty_cache()


def layer(N: int = 8192, E: int = 112) -> None:
    """One full-width MoE layer as an EP-8 rank sees it: the router over its own experts, everything resident."""
    from torch.profiler import ProfilerActivity, profile

    from megamoe.layers.config import FFNConfig, MoEConfig
    from megamoe.layers.moe import MoE
    from megamoe.ops.registry import status

    config = MoEConfig(num_experts=E, top_k=16, expert_size=3072, latent=3584, num_shared_experts=2)
    torch.manual_seed(0)
    moe = MoE(7168, 1e-5, config, FFNConfig()).cuda().bfloat16()
    for name, parameter in moe.named_parameters():
        torch.nn.init.ones_(parameter) if parameter.dim() == 1 else torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if "experts.w" in name:
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    x = torch.randn(N, 7168, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)

    def step():
        y, _ = moe(x)
        y.backward(dy)
        moe.zero_grad(set_to_none=True)

    params = 3 * 16 * 3584 * 3072 + 2 * 7168 * 3584 + 3 * 7168 * 6144 + 7168 * E
    report(f"MoE layer {N} tokens, {E} experts, fwd+bwd", time_ms(step, 5), 6 * N * params, "TFLOP/s")
    for choice in status():
        print(f"  {choice.op}: {choice.backend}")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda k: -k.self_device_time_total)[:24]
    total = sum(k.self_device_time_total for k in trace.key_averages())
    for k in rows:
        print(f"  {k.self_device_time_total / 1e3:8.3f} ms {k.self_device_time_total / total:6.1%} {k.count:4d}x {k.key[:110]}")
        RESULTS.append({"kernel": k.key, "ms": k.self_device_time_total / 1e3, "count": k.count})


def plan_time() -> None:
    from megamoe.ops.moe_plan import cuda

    planner = cuda.load()
    for name, count in (("random", torch.randint(0, 300, (896,))), ("zipf", (1e5 / (1 + torch.randperm(896))).long())):
        count = count.int().cuda()
        for P in (8, 64):
            report(f"plan 896 experts x {P} ranks, {name} (graph)", graph_ms(lambda: planner(count, P)), 0, "TB/s", "bar 0.060 ms")


def variants():
    """(kernel, Tile) pairs of the `tiles` section."""
    from megamoe.ops.grouped_mlp.triton import Tile

    big = {
        "up": [Tile(128, 128, 64, 4, 8), Tile(128, 128, 64, 4, 8, group=10)],
        "down": [Tile(128, 256, 64, 3, 8), Tile(128, 256, 64, 3, 8, group=5), Tile(256, 128, 64, 3, 8)],
        "d_hidden": [
            Tile(128, 128, 64, 4, 8),
            Tile(128, 128, 64, 3, 8, 2, max_registers=128),
            Tile(128, 64, 64, 3, 8, 2, max_registers=128),
            Tile(128, 64, 64, 3, 4, 3, max_registers=160),
        ],
        "d_rows": [Tile(128, 256, 64, 4, 8), Tile(128, 256, 64, 4, 8, group=5)],
        "d_weight": [Tile(128, 128, 64, 3, 4, 2), Tile(128, 128, 64, 3, 4, 2, group=28)],
        "d_weight_add": [Tile(128, 128, 64, 3, 4, 2, parts=4), Tile(128, 256, 64, 3, 8, parts=4)],
    }
    small = {
        "up": [Tile(64, 128, 64, 4, 8), Tile(64, 128, 64, 3, 8), Tile(64, 128, 64, 3, 4, 1), Tile(64, 256, 64, 3, 8)],
        "down": [Tile(64, 128, 64, 4, 4, 2), Tile(64, 256, 64, 3, 8)],
    }
    return [(k, t) for k, ts in big.items() for t in ts], [(k, t) for k, ts in small.items() for t in ts]


def one_product(kind: str, tile, x, count, ws, hidden, dout):
    """A call that runs one kernel under one tile, and the products in it (of 2 R D F)."""
    from megamoe.ops.grouped_mlp import triton as g

    plan = g.make_plan(count, x.shape[0], g.Rules(tile, tile, tile, tile, tile))
    act = (True, 4.0, 25.0)
    calls = {
        "up": (lambda: g.up_fwd(plan, x, ws[0], ws[1], act, keep=True), 2),
        "down": (lambda: g.down_fwd(plan, hidden, ws[2]), 1),
        "d_hidden": (lambda: g.hidden_bwd(plan, dout, ws[2], hidden, hidden, act), 1),
        "d_rows": (lambda: g.rows_bwd(plan, hidden, hidden, ws[0], ws[1]), 2),
        "d_weight": (lambda: g.weight_bwd(plan, hidden, x, ws[0]), 1),
        "d_weight_add": (lambda: g.weight_bwd(plan, hidden, x, ws[0], MAIN_GRAD[0]), 1),
    }
    return calls[kind]


MAIN_GRAD: list = [None]
ONLY: list[str] = []


def tiles() -> None:
    import torch.nn.functional as F

    for (E, per), chosen in zip(((112, 1170), (896, 146)), variants()):
        x, count, ws = experts(E, per, 3584, 3072)
        hidden, dout = torch.randn(x.shape[0], 3072, device="cuda").bfloat16(), torch.randn_like(x)
        MAIN_GRAD[0] = torch.zeros(ws[0].shape, device="cuda") if E < 500 else None
        flop = 2 * x.shape[0] * 3584 * 3072
        end = count.cumsum(0, dtype=torch.int32)
        report(f"{E}x{per} grouped_mm hidden Wd^T", time_ms(lambda: F.grouped_mm(hidden, ws[2].transpose(1, 2), offs=end), 3), flop, "TFLOP/s")
        if E < 500:
            report(f"{E}x{per} grouped_mm dout Wd", time_ms(lambda: F.grouped_mm(dout, ws[2], offs=end), 3), flop, "TFLOP/s")
            report(f"{E}x{per} grouped_mm dgate^T x", time_ms(lambda: F.grouped_mm(hidden.t(), x, offs=end), 3), flop, "TFLOP/s")
        for kind, tile in chosen:
            if ONLY and kind not in ONLY:
                continue
            try:
                call, products = one_product(kind, tile, x, count, ws, hidden, dout)
                t = f"{tile.BM}x{tile.BN}x{tile.BK} s{tile.stages} w{tile.warps} p{tile.per_sm} g{tile.group} r{tile.max_registers} a{tile.parts}"
                report(f"{E}x{per} {kind} {t}", time_ms(call, 3), products * flop, "TFLOP/s")
            except Exception as error:  # a tile that does not fit is a line of the table, not the end of it
                print(f"{kind} {tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        del x, ws, hidden, dout
        MAIN_GRAD[0] = None
        torch.cuda.empty_cache()


def precompile(share: int, shares: int) -> None:
    """Run every share-th variant on a tiny problem whose kernels compile to the same binaries."""
    pairs = sum(variants(), [])
    x, count, ws = experts(16, 32, 256, 256)
    hidden, dout = torch.randn(x.shape[0], 256, device="cuda").bfloat16(), torch.randn_like(x)
    MAIN_GRAD[0] = torch.zeros(ws[0].shape, device="cuda")
    for kind, tile in pairs[share::shares]:
        try:
            one_product(kind, tile, x, count, ws, hidden, dout)[0]()
        except Exception as error:
            print(f"precompile {kind} {tile}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    torch.cuda.synchronize()


def main() -> None:
    sections = {"attn": attn, "routing": routing, "dispatch": dispatch, "elementwise": elementwise, "grouped": grouped, "tiles": tiles, "plan": plan_time, "layer": layer}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(sections)}; default: all but tiles, plan and layer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="tiles: these products alone")
    parser.add_argument("--precompile", nargs=2, type=int, metavar=("SHARE", "SHARES"))
    args = parser.parse_args()
    if args.precompile:
        return precompile(*args.precompile)
    unknown = [name for name in args.sections if name not in sections]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(sections)}")
    ONLY.extend(args.only)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    print(HEAD)
    ceilings()
    for name in args.sections or ["attn", "routing", "dispatch", "elementwise", "grouped"]:
        sections[name]()
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
