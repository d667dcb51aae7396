#!/usr/bin/env python3
"""Time an op's kernels against the best open control, in one process, with the control's error beside ours.

    python tools/bench_ops.py kda --out bench                       every case, control where it is compiled or compiles in time
    python tools/bench_ops.py kda --out bench --control-workers 14  compile the control's autotuning space in parallel first
    python tools/bench_ops.py kda --out bench --cases 8192x96 --no-control

Writes kda.json and kda.png under --out and prints the table. What is measured: medians of event-timed calls (forward under
no_grad, backward alone on a kept graph, both), forward by graph replay, host time of an eager call, peak memory of one
forward+backward with inputs and gradients counted, and errors against float64 for ours and the control. The kernels that ran
are read from the profiler and asserted: a benchmark that times the wrong engine is worse than none. Ceilings (copy,
bf16 product) are measured in the same process; "roof" is the larger of bytes/copy and operations/product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megamoe.ops.kda_chunk import cuda, fla  # noqa: E402
from megamoe.ops.kda_chunk.reference import kda_chunk as reference  # noqa: E402

W = 128
CASES = {"8192x96": (8192, 96, None), "8x1024x96": (8192, 96, [1024] * 8), "ragged x96": (8192, 96, [1, 37, 3000, 16, 1500, 700, 2000, 938]),
         "32768x96": (32768, 96, None), "8192x12": (8192, 12, None), "32768x12": (32768, 12, None), "131072x12": (131072, 12, None)}  # fmt: skip
# Measured on an H200 with FLA 0.6.0, torch 2.11.0+cu130, triton 3.6.0 (reference/kernels.md 2.5): forward, backward, both, ms.
STORED_CONTROL = {"8192x96": (2.62, 9.91, 12.52), "32768x96": (10.39, 39.60, 50.00), "8192x12": (1.67, 2.50, 4.44), "32768x12": (1.92, 5.97, 7.88), "131072x12": (7.45, 23.63, 31.08)}
GATES = {"uniform": (1.0, 0.0), "slow": (0.5, -6.2), "saturated": (0.5, 9.0)}  # logits: scale, offset
BYTES = {"fwd": 1282, "bwd": 2306, "both": 3588}  # a token-head: every input read once, every output written once
FLOPS = {"fwd": 6 * W * W + 8 * 16 * W, "bwd": 16 * W * W + 28 * 16 * W + 4.67 * 256, "both": 22 * W * W + 36 * 16 * W + 4.67 * 256}
OUR_KERNELS, CONTROL_KERNELS = ("sm90_kda", "kda_bwd"), ("chunk_kda", "chunk_gated_delta_rule", "kda")


def make_inputs(T, H, lengths, gate="uniform", seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scale, offset = GATES[gate]
    rows = [torch.randn(T, H, W, device="cuda", generator=generator) for _ in range(4)]
    rows[3] = rows[3] * scale + offset
    inputs = [x.bfloat16() for x in rows] + [torch.randn(T, H, device="cuda", generator=generator), torch.zeros(H, device="cuda"), torch.zeros(H, W, device="cuda")]
    cu = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return [x.requires_grad_() for x in inputs], cu


def call(op, inputs, cu):
    return op(*inputs[:5], A_log_H=inputs[5], dt_bias_HK=inputs[6], cu_seqlens=cu)[0]


def median_ms(function, repeats=20, warm=3):
    for _ in range(warm):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record(), function(), stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def measure(op, T, H, lengths, gate):
    inputs, cu = make_inputs(T, H, lengths, gate)

    def forward():
        with torch.no_grad():
            return call(op, inputs, cu)

    result = dict(fwd=median_ms(forward))
    o = call(op, inputs, cu)
    d_o = torch.randn_like(o)
    result["bwd"] = median_ms(lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True), repeats=10, warm=2)
    result["both"] = median_ms(lambda: torch.autograd.grad(call(op, inputs, cu), inputs, d_o), repeats=10, warm=2)
    del o
    torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(call(op, inputs, cu), inputs, d_o)
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del grads
    return result


def graph_and_host(op, T, H, lengths):
    """Forward by graph replay, ms; and the host's share of one eager call, µs."""
    inputs, cu = make_inputs(T, H, lengths)
    with torch.no_grad():
        call(op, inputs, cu)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(op, inputs, cu)
    replay = median_ms(graph.replay)
    host = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            call(op, inputs, cu)
        host.append((time.perf_counter() - start) * 1e6)
    return replay, statistics.median(host)


def errors(op, gate):
    """RMS ratio of the output and of every gradient against float64, 8192 tokens and 96 heads (the shape the control is compiled for)."""
    inputs, cu = make_inputs(8192, 96, None, gate)
    weight = torch.randn(8192, 96, W, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).bfloat16()

    def all_of(op, inputs):
        o = call(op, inputs, cu)
        return [o.detach(), *torch.autograd.grad(o, inputs, weight.to(o.dtype))]

    expected = all_of(reference, [x.detach().double().requires_grad_() for x in inputs])
    names = ("o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")
    return {n: ((a.double() - b).norm() / b.norm()).item() for n, a, b in zip(names, all_of(op, inputs), expected)}


def assert_kernels(op, wanted, unwanted=()):
    inputs, cu = make_inputs(256, 2, None)
    torch.autograd.grad(call(op, inputs, cu).sum(), inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(call(op, inputs, cu).sum(), inputs)
        torch.cuda.synchronize()
    names = sorted({event.key for event in profile.key_averages()})
    if not any(any(w in n for w in wanted) for n in names) or any(any(u in n for u in unwanted) for n in names):
        raise SystemExit(f"the wrong engine ran: {names}")
    return names


def ceilings():
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() / median_ms(lambda: b.copy_(a), 10) / 1e9
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return dict(copy_tbs=copy, bf16_tflops=2 * 8192**3 / median_ms(lambda: x @ y, 10) / 1e9)


WORKER = """
import sys, triton.runtime.autotuner as at
share, shares = int(sys.argv[1]), int(sys.argv[2])
prune = at.Autotuner.prune_configs
at.Autotuner.prune_configs = lambda self, kwargs: (lambda c: c[share::shares] or c[:1])(prune(self, kwargs))
def compile_only(self, *args, config, **meta):
    try: self.fn.run(*args, warmup=True, **{**meta, **config.all_kwargs()})
    except Exception: pass
    return [1.0]
at.Autotuner._bench = compile_only
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import bench_ops
for T, H in [tuple(map(int, s.split('x'))) for s in sys.argv[5:]]:
    inputs, cu = bench_ops.make_inputs(T, H, None)
    o = bench_ops.call(bench_ops.fla.kda_chunk, inputs, cu)
    bench_ops.torch.autograd.grad(o.sum(), inputs)
"""


def warm_control(shapes, workers):
    """Compile every configuration that the control would try, shared out over processes, into Triton's cache. Seconds taken."""
    start = time.perf_counter()
    environment = os.environ | {"TRITON_CACHE_AUTOTUNING": "0"}
    command = [sys.executable, "-c", WORKER]
    running = [subprocess.Popen([*command, str(i), str(workers), str(ROOT), str(ROOT / "tools"), *shapes], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for i in range(workers)]
    for process in running:
        message = process.communicate()[1]
        if process.returncode:
            print(message.decode().strip().splitlines()[-1:], file=sys.stderr)
    return time.perf_counter() - start


def kda(arguments):
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    reason = cuda.why_not()
    if reason:
        raise SystemExit(f"bench_ops kda: the cuda backend cannot serve: {reason}")
    ours, control = cuda.load(), None
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, ceilings=ceilings(), cases=[], stored_control=STORED_CONTROL)
    report["kernels"] = assert_kernels(ours, OUR_KERNELS, CONTROL_KERNELS[:2])
    report["errors"] = {gate: dict(ours=errors(ours, gate)) for gate in GATES}
    cases = arguments.cases or list(CASES)
    for name in cases:
        T, H, lengths = CASES[name]
        for gate in GATES if T * H <= 2**20 else ("uniform",):
            report["cases"].append(dict(case=name, gate=gate, ours=measure(ours, T, H, lengths, gate)))
        report["cases"][-1]["ours_graph_ms"], report["cases"][-1]["ours_host_us"] = graph_and_host(ours, T, H, lengths)
        print(f"  {name}: ours {report['cases'][-1]['ours']}", file=sys.stderr, flush=True)
    save(report, out)
    if not arguments.no_control:
        if fla.why_not():
            print(f"no control: {fla.why_not()}", file=sys.stderr)
        else:
            if arguments.control_workers:
                report["control_compile_s"] = warm_control(["8192x96"], arguments.control_workers)
                print(f"  control compiled in {report['control_compile_s']:.0f} s by {arguments.control_workers} processes", file=sys.stderr, flush=True)
            control = fla.load()
            start = time.perf_counter()
            inputs, cu = make_inputs(8192, 96, None)
            torch.autograd.grad(call(control, inputs, cu).sum(), inputs)
            torch.cuda.synchronize()
            report["control_first_call_s"] = time.perf_counter() - start
            del inputs
            print(f"  control's first call: {report['control_first_call_s']:.0f} s", file=sys.stderr, flush=True)
            for row in report["cases"]:
                if row["case"] == "8192x96":  # the pair: control and ours again, back to back
                    T, H, lengths = CASES[row["case"]]
                    row["control"], row["ours"] = measure(control, T, H, lengths, row["gate"]), measure(ours, T, H, lengths, row["gate"])
                    save(report, out)
            for gate in GATES:
                report["errors"][gate]["control"] = errors(control, gate)
    save(report, out)
    print(table(report))
    plot(report, out / "kda.png")


def save(report, out):
    (out / "kda.json").write_text(json.dumps(report, indent=1))


def roof_ms(report, name, part):
    T, H, _ = CASES[name]
    return max(BYTES[part] * T * H / report["ceilings"]["copy_tbs"] / 1e9, FLOPS[part] * T * H / report["ceilings"]["bf16_tflops"] / 1e9)


def table(report):
    lines = [f"{report['device']}, torch {report['torch']}; copy {report['ceilings']['copy_tbs']:.2f} TB/s, bf16 product {report['ceilings']['bf16_tflops']:.0f} TFLOP/s",
             f"{'case':<11} {'gate':<9} {'part':<4} {'ours ms':>8} {'control':>8} {'ratio':>6} {'TB/s':>5} {'TFLOP/s':>7} {'of roof':>7} {'GiB':>5}"]  # fmt: skip
    for row in report["cases"]:
        T, H, _ = CASES[row["case"]]
        for i, part in enumerate(("fwd", "bwd", "both")):
            ms = row["ours"][part]
            paired = row.get("control")
            other = paired[part] if paired else STORED_CONTROL.get(row["case"], (None,) * 3)[i]
            control = "–" if other is None else f"{other:.2f}{' ' if paired else '*'}"
            ratio = "–" if other is None else f"{other / ms:.2f}"
            lines.append(f"{row['case']:<11} {row['gate']:<9} {part:<4} {ms:8.3f} {control:>8} {ratio:>6} {BYTES[part] * T * H / ms / 1e9:5.2f} {FLOPS[part] * T * H / ms / 1e9:7.0f} "
                         f"{roof_ms(report, row['case'], part) / ms:7.0%} {row['ours']['peak_gib'] if part == 'both' else 0:5.2f}")  # fmt: skip
        if "ours_graph_ms" in row:
            lines.append(f"{row['case']:<11} forward by graph replay {row['ours_graph_ms']:.3f} ms, host {row['ours_host_us']:.0f} µs a call")
    lines.append("* stored control: FLA 0.6.0 on an H200, uniform gates (see STORED_CONTROL)")
    for gate, who in report["errors"].items():
        for name, values in who.items():
            lines.append(f"error vs float64, {gate:<9} {name:<7} " + " ".join(f"{k} {v:.1e}" for k, v in values.items()))
    return "\n".join(lines)


def plot(report, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in report["cases"] if r["gate"] == "uniform"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, part, index in ((axes[0], "fwd", 0), (axes[1], "bwd", 1)):
        for i, row in enumerate(rows):
            other = row.get("control", {}).get(part) or STORED_CONTROL.get(row["case"], (None,) * 3)[index]
            axis.bar(i - 0.2, row["ours"][part], 0.4, color="#1b6ca8", label="ours" if i == 0 else None)
            if other:
                axis.bar(i + 0.2, other, 0.4, color="#c9c9c9", label="FLA 0.6.0" if i == 0 else None)
                axis.annotate(f"{other / row['ours'][part]:.1f}×", (i - 0.2, row["ours"][part]), ha="center", va="bottom", fontsize=8)
            axis.plot([i - 0.4, i], [roof_ms(report, row["case"], part)] * 2, color="black", linewidth=1, label="roof" if i == 0 else None)
        axis.set(title=f"KDA {part}, ms (uniform gates)", yscale="log")
        axis.set_xticks(range(len(rows)), [r["case"] for r in rows], rotation=20, fontsize=8)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["kda"])
    parser.add_argument("--out", default="bench")
    parser.add_argument("--cases", nargs="*", choices=list(CASES))
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--control-workers", type=int, default=0, help="processes that compile the control's configurations first (0: let it compile by itself, minutes)")
    kda(parser.parse_args())


if __name__ == "__main__":
    main()
