#!/usr/bin/env python3
"""Plain residuals, block AttnRes and full AttnRes side by side: loss at equal tokens and peak activation memory, in one picture.

    python tools/plot_attn_res.py --output attn_res.png                                   # CPU: 16 narrow layers, 80 steps each
    python tools/plot_attn_res.py --at-once experiment=k3_0p4b_h200 train.num_steps=60    # your configuration instead

Three runs of launch/pretrain.py that differ in `model.attn_res` alone: same data, order, seed and steps. A run folder that is there
already is resumed, so a broken comparison continues. Memory is measured afterwards, on one micro-batch of each, with and without
recomputation of whole layers (`megamoe/testing/memory.py` says what counts). Writes the picture and a JSON file of the same name.

What it does not show: which is better in the end. Some dozens of steps of a small model say only that all three learn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

KINDS = {"plain residuals": '"off"', "block AttnRes": "block", "full AttnRes": "full"}
SMOOTH_STEPS = 8
RECOMPUTE = ("none", "full")
# Deep and narrow: what the three keep differs by a multiple of layers · tokens · width, and everything else shrinks with the width.
DEMO = [
    "model.num_layers=16", "model.full_attn_layers=[4,8,12,16]", "model.attn_res_block_size=4", "model.d_model=64", "model.kda.num_heads=2", "model.mla.num_heads=2",
    "model.mla.q_lora_rank=32", "model.mla.kv_lora_rank=32", "model.ffn.dense_size=192", "model.moe.expert_size=32", "model.moe.latent=32",
    "train.seq_len=512", "train.global_batch_tokens=2048", "train.micro_batch_tokens=2048", "train.num_steps=80", "train.eval_interval_steps=20", "train.eval_windows=16",
]  # fmt: skip
QUIET = ["checkpoint.interval_steps=0", "monitor.wandb=off", "monitor.log_interval_steps=1"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("attn_res.png"))
    parser.add_argument("--runs", type=Path, default=Path("runs/attn_res"), help="folder of the three run folders")
    parser.add_argument("--at-once", action="store_true", help="train the three beside one another, where the device has room for it")
    args, overrides = parser.parse_known_args(argv)
    # After the arguments: --help should not wait for these.
    from launch.schema import compose
    from megamoe.utils.errors import UserError

    common = [*(overrides or DEMO), *QUIET]
    jobs = {name: [*common, f"model.attn_res={kind}", f"run.dir={args.runs / name.split()[0]}"] for name, kind in KINDS.items()}
    try:
        configs = {name: compose(words) for name, words in jobs.items()}
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if failed := train(jobs, at_once=args.at_once):
        print(f"plot_attn_res: {failed} did not finish; its log is {args.runs / failed.split()[0]}.log", file=sys.stderr)
        return 1
    result = {name: curves(args.runs / name.split()[0]) | {"activation": memory(config, words, compose)} for (name, config), words in zip(configs.items(), jobs.values())}
    args.output.with_suffix(".json").write_text(json.dumps({"overrides": common, "results": result}, indent=1))
    draw(result, next(iter(configs.values())), args.output)
    print(table(result))
    print(f"picture: {args.output}, figures: {args.output.with_suffix('.json')}")
    return 0


def train(jobs: dict[str, list[str]], *, at_once: bool) -> str:
    """Run them; returns the name of the first that failed, or nothing."""
    started = []
    for name, words in jobs.items():
        run_dir = Path(words[-1].removeprefix("run.dir="))
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.with_name(run_dir.name + ".log").open("w")
        started.append((name, subprocess.Popen([sys.executable, str(ROOT / "launch" / "pretrain.py"), *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.STDOUT)))
        if not at_once and started[-1][1].wait():
            break
    return next((name for name, process in started if process.wait()), "")


def curves(run_dir: Path) -> dict:
    from megamoe.monitor.metrics import read_metrics

    rows = read_metrics(run_dir).rows
    series = {key: [row[key] for row in rows if key in row] for key in ("tokens", "loss", "bits_per_byte")}
    heldout = [(row["tokens"], row["eval_bits_per_byte"]) for row in rows if "eval_bits_per_byte" in row and "tokens" in row]
    return series | {"heldout_tokens": [t for t, _ in heldout], "heldout_bits_per_byte": [b for _, b in heldout]}


def memory(config, words: list[str], compose) -> dict[str, dict[str, int]]:
    """Peak and kept bytes of a micro-batch by recompute policy."""
    import torch

    from megamoe.parallel.distributed import pick_device
    from megamoe.testing.memory import activation_memory

    device, found = pick_device(config.train.device.value), {}
    for policy in RECOMPUTE:
        m = activation_memory(compose([*words, f"train.recompute={policy}"]), device)
        found[policy] = {"peak_bytes": m.peak_bytes, "saved_bytes": m.saved_bytes}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def table(result: dict) -> str:
    lines = [f"{'':16} {'tokens':>9} {'train loss':>10} {'held-out bits/byte':>18} {'peak MiB':>9} {'kept MiB':>9} {'peak MiB, recomputed':>21} {'kept MiB, recomputed':>21}"]
    for name, r in result.items():
        a, last = r["activation"], r["loss"][-10:]
        sizes = "".join(f"{a[policy][key] / 2**20:>{width}.1f}" for policy, width in (("none", 10), ("full", 22)) for key in ("peak_bytes", "saved_bytes"))
        lines.append(f"{name:16} {r['tokens'][-1]:>9} {sum(last) / len(last):>10.4f} {r['heldout_bits_per_byte'][-1]:>18.4f}{sizes}")
    return "\n".join(lines)


def draw(result: dict, config, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megamoe.monitor.plot import COLOURS

    figure = Figure(figsize=(13, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    colours = dict(zip(result, COLOURS))
    for name, r in result.items():
        # Every step reads another text, so single steps differ more than the runs do.
        n = min(SMOOTH_STEPS, len(r["tokens"]))
        means = [sum(r["bits_per_byte"][i - n : i]) / n for i in range(n, len(r["tokens"]) + 1)]
        left.plot([t / 1e3 for t in r["tokens"][n - 1 :]], means, color=colours[name], linewidth=1, alpha=0.6)
        left.plot([t / 1e3 for t in r["heldout_tokens"]], r["heldout_bits_per_byte"], color=colours[name], marker="o", markersize=4, label=f"{name}: held out {r['heldout_bits_per_byte'][-1]:.3f}")
    m, t = config.model, config.train
    left.set(xlabel="thousand tokens", ylabel="bits per byte", title=f"{m.num_layers} layers, width {m.d_model}, blocks of {m.attn_res_block_size}\nthin: training, mean of {n} steps; dots: held out")
    left.legend()
    left.grid(alpha=0.3)
    for axis, policy, title in ((middle, "none", "nothing recomputed"), (right, "full", "layers recomputed")):
        for i, (name, r) in enumerate(result.items()):
            peak, kept = (r["activation"][policy][key] / 2**20 for key in ("peak_bytes", "saved_bytes"))
            axis.bar(i, peak, color=colours[name], alpha=0.45)
            axis.bar(i, min(kept, peak), color=colours[name])
            axis.text(i, peak, f"{peak:.4g}", ha="center", va="bottom")
        axis.set_xticks(range(len(result)), [name.replace(" ", "\n") for name in result])
        axis.set(ylabel=f"MiB, micro-batch of {t.micro_batch_tokens:,} tokens", title=f"activations, {title}\ndark: kept for backward, light: peak")
        axis.margins(y=0.12)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
