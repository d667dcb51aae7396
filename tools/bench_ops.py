#!/usr/bin/env python3
"""Time an op's kernels against the best open control, in one process, with the control's error beside ours.

    python tools/bench_ops.py kda --out bench                       every case, control where it is compiled or compiles in time
    python tools/bench_ops.py kda --out bench --control-workers 14  compile the control's autotuning space in parallel first
    python tools/bench_ops.py kda --out bench --cases 8192x96 --no-control

Writes kda.json and kda.png under --out and prints the table. What is measured: medians of event-timed calls (forward under
no_grad, backward alone on a kept graph, both), the same by graph replay, host time of eager calls, bytes kept for backward,
peak memory of one forward+backward with inputs and gradients counted, and errors against float64 for ours and the control.
Cases in PAIRED are timed for both in one process, back to back; the others stand beside the stored control. The kernels that
ran are read from the profiler and asserted: a benchmark that times the wrong engine is worse than none. Ceilings (copy, bf16
product) are measured in the same process; "roof" is the larger of bytes/copy and operations/product.
Exit code 1 when the control was asked for and did not run to its end; what was measured until then is written all the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
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
PAIRED = ("8192x96", "32768x12")  # one compilation of the control for each number of heads
OUR_KERNELS = ("sm90_kda_chunk_fwd", "sm90_kda_bwd_prep", "sm90_kda_bwd_scan", "sm90_kda_bwd_grad", "sm90_kda_bwd_sum")
CONTROL_KERNELS = ("chunk_kda_fwd_kernel", "chunk_kda_bwd_kernel", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd")
ERROR_RATIO = 1.25  # ours over the control's, at most


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
    result["saved_bytes"] = saved_bytes(op, inputs, cu) / (T * H)
    return result


def saved_bytes(op, inputs, cu):
    """Bytes that autograd keeps between forward and backward, each storage once."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = call(op, inputs, cu)
    del o
    return sum(storages.values())


def graph_ms(op, T, H, lengths):
    """Forward, and forward + backward, by CUDA graph replay: what the device takes when the host costs nothing."""
    inputs, cu = make_inputs(T, H, lengths)
    d_o = torch.randn(T, H, W, device="cuda").bfloat16()

    def forward():
        with torch.no_grad():
            call(op, inputs, cu)

    def both():
        torch.autograd.grad(call(op, inputs, cu), inputs, d_o)

    result = {}
    for name, function in (("fwd", forward), ("both", both)):
        side = torch.cuda.Stream()  # autograd asks for a first run on the stream that captures
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        result[name] = median_ms(graph.replay)
        del graph
    return result


def host_us(op, T=256, H=2, repeats=200):
    """What one eager call costs the host, µs: medians over calls that find an idle device, on a shape too small to matter."""
    inputs, cu = make_inputs(T, H, None)
    d_o = torch.randn(T, H, W, device="cuda").bfloat16()
    times = {"fwd without grad": [], "fwd": [], "bwd": []}

    def timed(name, function):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        times[name].append((time.perf_counter() - start) * 1e6)
        return result

    for _ in range(repeats):
        with torch.no_grad():
            timed("fwd without grad", lambda: call(op, inputs, cu))
        o = timed("fwd", lambda: call(op, inputs, cu))
        timed("bwd", lambda: torch.autograd.grad(o, inputs, d_o))
    return {name: statistics.median(x[repeats // 10 :]) for name, x in times.items()}


def errors(op, gate, heads_at_once=16):
    """Against float64, 8192 tokens and 96 heads (a shape the control is compiled for): {tensor: (RMS ratio, largest error over the
    largest value)} of the output and of every gradient. The float64 side goes head group by head group: heads do not interact."""
    inputs, cu = make_inputs(8192, 96, None, gate)
    weight = torch.randn(8192, 96, W, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).bfloat16()

    def all_of(op, inputs, weight):
        o = call(op, inputs, cu)
        return [o.detach(), *torch.autograd.grad(o, inputs, weight.to(o.dtype))]

    names = ("o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")
    head_dim = (1, 1, 1, 1, 1, 1, 0, 0)
    actual = all_of(op, inputs, weight)
    sums = {n: torch.zeros(4, dtype=torch.float64, device="cuda") for n in names}  # error², value², largest error, largest value
    for h in range(0, 96, heads_at_once):
        group = [x.detach().narrow(d, h, heads_at_once).double().requires_grad_() for x, d in zip(inputs, head_dim[1:])]
        expected = all_of(reference, group, weight[:, h : h + heads_at_once])
        for n, d, a, b in zip(names, head_dim, actual, expected):
            error = (a.narrow(d, h, heads_at_once).double() - b).abs()
            s = sums[n]
            s[0] += error.square().sum()
            s[1] += b.square().sum()
            s[2] = torch.maximum(s[2], error.max())
            s[3] = torch.maximum(s[3], b.abs().max())
        del group, expected, a, b, error
    torch.cuda.empty_cache()
    return {n: ((s[0] / s[1]).sqrt().item(), (s[2] / s[3]).item()) for n, s in sums.items()}


def assert_kernels(op, wanted, unwanted, T, H):
    """Names of the kernels of one forward + backward; ends the benchmark unless all of `wanted` and none of `unwanted` ran."""
    inputs, cu = make_inputs(T, H, None)
    torch.autograd.grad(call(op, inputs, cu).sum(), inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(call(op, inputs, cu).sum(), inputs)
        torch.cuda.synchronize()
    names = sorted({event.key for event in profile.key_averages()})
    missing, foreign = [w for w in wanted if not any(w in n for n in names)], [n for n in names if any(u in n for u in unwanted)]
    if missing or foreign:
        raise SystemExit(f"bench_ops kda: the wrong engine ran: missing {missing}, foreign {foreign}, seen {names}")
    return names


def ceilings():
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() / median_ms(lambda: b.copy_(a), 10) / 1e9
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return dict(copy_tbs=copy, bf16_tflops=2 * 8192**3 / median_ms(lambda: x @ y, 10) / 1e9)


# Compiles every configuration that the control's autotuner would try and launches nothing: the cache on disk is all that counts.
# Shares of a kernel's configurations start at another worker for each kernel, so that short lists spread too.
WORKER = """
import sys, zlib, triton.runtime.autotuner as autotuner, triton.runtime.jit as jit
share, shares = int(sys.argv[1]), int(sys.argv[2])
launch = jit.JITFunction.run
jit.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launch(self, *args, grid=grid, warmup=True, **kwargs)
compiled, refused = 0, []
def compile_share(self, *args, **kwargs):
    global compiled
    self.nargs = dict(zip(self.arg_names, args))
    name = self.base_fn.__name__
    for i, config in enumerate(self.prune_configs(kwargs)):
        if (i + zlib.crc32(name.encode())) % shares == share:
            try:
                self.fn.run(*args, **kwargs | config.all_kwargs())
                compiled += 1
            except Exception as error:
                refused.append(f'{name}: {type(error).__name__}: {error}'[:200])
autotuner.Autotuner.run = compile_share
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import bench_ops
control = bench_ops.fla.load()
for case in sys.argv[5:]:
    T, H, lengths = bench_ops.CASES[case]
    inputs, cu = bench_ops.make_inputs(T, H, lengths)
    bench_ops.torch.autograd.grad(bench_ops.call(control, inputs, cu).sum(), inputs)
print(compiled, len(refused), *refused[:1])
"""


def warm_control(cases, workers):
    """Fill Triton's cache on disk with the control's configurations for these cases. Returns (seconds, each worker's last line)."""
    start = time.perf_counter()
    torch.cuda.empty_cache()  # every worker holds one case's tensors
    command = [sys.executable, "-c", WORKER]
    running = [subprocess.Popen([*command, str(i), str(workers), str(ROOT), str(ROOT / "tools"), *cases], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(workers)]
    said = []
    for process in running:
        out, err = process.communicate()
        lines = (out if process.returncode == 0 else err).strip().splitlines()
        said.append(lines[-1] if lines else f"exit code {process.returncode}")
    return time.perf_counter() - start, said


def kda(arguments):
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    reason = cuda.why_not()
    if reason:
        raise SystemExit(f"bench_ops kda: the cuda backend cannot serve: {reason}")
    ours = cuda.load()
    inputs, cu = make_inputs(4096, 7, None)  # a shape that nothing has seen: what a first call costs
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.autograd.grad(call(ours, inputs, cu).sum(), inputs)
    torch.cuda.synchronize()
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, first_call_s=time.perf_counter() - start, ceilings=ceilings(), cases=[], stored_control=STORED_CONTROL)
    report["kernels"] = assert_kernels(ours, OUR_KERNELS, CONTROL_KERNELS, 256, 2)
    report["host_us"] = host_us(ours)
    report["errors"] = {gate: dict(ours=errors(ours, gate)) for gate in GATES}
    cases = arguments.cases or list(CASES)
    for name in cases:
        T, H, lengths = CASES[name]
        for gate in GATES if T * H <= 2**20 else ("uniform",):
            report["cases"].append(dict(case=name, gate=gate, ours=measure(ours, T, H, lengths, gate)))
            if gate == "uniform":
                report["cases"][-1]["ours_graph_ms"] = graph_ms(ours, T, H, lengths)
        print(f"  {name}: ours {report['cases'][-1]['ours']}", file=sys.stderr, flush=True)
    save(report, out)
    failed = False
    if not arguments.no_control:
        try:
            pair(report, out, ours, [name for name in PAIRED if name in cases], arguments.control_workers)
        except Exception as error:
            traceback.print_exc()
            report["control_failed"], failed = f"{type(error).__name__}: {error}", True
    save(report, out)
    print(table(report))
    plot(report, out / "kda.png")
    if failed:
        raise SystemExit(f"bench_ops kda: the control did not run to its end: {report['control_failed']}")


def pair(report, out, ours, cases, workers):
    """Time the control and ours again, back to back, case by case; then the control's errors. Adds to `report` as it goes."""
    if fla.why_not():
        raise RuntimeError(fla.why_not())
    if workers:
        report["control_compile_s"], report["control_workers"] = warm_control(cases, workers)
        print(f"  control compiled in {report['control_compile_s']:.0f} s by {workers} processes (compiled, refused): {report['control_workers']}", file=sys.stderr, flush=True)
    control = fla.load()
    for name in cases:
        T, H, lengths = CASES[name]
        start = time.perf_counter()
        inputs, cu = make_inputs(T, H, lengths)
        torch.autograd.grad(call(control, inputs, cu).sum(), inputs)
        torch.cuda.synchronize()
        report.setdefault("control_first_call_s", {})[name] = time.perf_counter() - start
        del inputs
        print(f"  {name}: the control's first call took {report['control_first_call_s'][name]:.0f} s", file=sys.stderr, flush=True)
        report.setdefault("control_kernels", {})[name] = assert_kernels(control, CONTROL_KERNELS, OUR_KERNELS, T, H)
        for row in report["cases"]:
            if row["case"] == name:
                row["control"], row["ours"] = measure(control, T, H, lengths, row["gate"]), measure(ours, T, H, lengths, row["gate"])
                save(report, out)
        if H == 96:
            for gate in GATES:
                report["errors"][gate]["control"] = errors(control, gate)
                save(report, out)


def save(report, out):
    (out / "kda.json").write_text(json.dumps(report, indent=1))


def roof_ms(report, name, part):
    T, H, _ = CASES[name]
    return max(BYTES[part] * T * H / report["ceilings"]["copy_tbs"] / 1e9, FLOPS[part] * T * H / report["ceilings"]["bf16_tflops"] / 1e9)


def table(report):
    lines = [f"{report['device']}, torch {report['torch']}; copy {report['ceilings']['copy_tbs']:.2f} TB/s, bf16 product {report['ceilings']['bf16_tflops']:.0f} TFLOP/s",
             f"{'case':<11} {'gate':<9} {'part':<4} {'ours ms':>8} {'control':>8} {'ratio':>6} {'TB/s':>5} {'TFLOP/s':>7} {'of roof':>7} {'GiB':>5} {'kept B':>6}"]  # fmt: skip
    for row in report["cases"]:
        T, H, _ = CASES[row["case"]]
        for i, part in enumerate(("fwd", "bwd", "both")):
            ms = row["ours"][part]
            paired = row.get("control")
            other = paired[part] if paired else STORED_CONTROL.get(row["case"], (None,) * 3)[i]
            control = "–" if other is None else f"{other:.2f}{' ' if paired else '*'}"
            ratio = "–" if other is None else f"{other / ms:.2f}"
            memory = f" {row['ours']['peak_gib']:5.2f} {row['ours']['saved_bytes']:6.0f}" if part == "both" else ""
            if part == "both" and paired:
                memory += f"   control {paired['peak_gib']:.2f} GiB, {paired['saved_bytes']:.0f} B"
            lines.append(f"{row['case']:<11} {row['gate']:<9} {part:<4} {ms:8.3f} {control:>8} {ratio:>6} {BYTES[part] * T * H / ms / 1e9:5.2f} {FLOPS[part] * T * H / ms / 1e9:7.0f} "
                         f"{roof_ms(report, row['case'], part) / ms:7.0%}{memory}")  # fmt: skip
        if "ours_graph_ms" in row:
            lines.append(f"{row['case']:<11} by graph replay: forward {row['ours_graph_ms']['fwd']:.3f} ms, both {row['ours_graph_ms']['both']:.3f} ms")
    lines.append("* stored control: FLA 0.6.0 on an H200, uniform gates (see STORED_CONTROL)")
    for row in report["cases"]:
        if "control" in row and row["gate"] == "uniform":
            drift = ", ".join(f"{part} {row['control'][part] / stored - 1:+.1%}" for part, stored in zip(("fwd", "bwd", "both"), STORED_CONTROL[row["case"]]))
            lines.append(f"{row['case']:<11} the paired control against the stored one: {drift}")
    lines.append("host, µs an eager call: " + ", ".join(f"{part} {us:.0f}" for part, us in report["host_us"].items()) + f"; first call at a new shape {report['first_call_s']:.2f} s")
    for gate, who in report["errors"].items():
        for name, values in who.items():
            lines.append(f"error vs float64, {gate:<9} {name:<7} " + " ".join(f"{k} {rms:.1e} (largest {largest:.1e})" for k, (rms, largest) in values.items()))
        if "control" in who:
            ratios = {k: who["ours"][k][0] / who["control"][k][0] for k in who["ours"]}
            lines.append(f"error, ours over the control's, {gate:<9} " + " ".join(f"{k} {r:.2f}{'' if r <= ERROR_RATIO else ' (above ' + str(ERROR_RATIO) + ')'}" for k, r in ratios.items()))
    if "control_failed" in report:
        lines.append(f"control: {report['control_failed']}")
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
