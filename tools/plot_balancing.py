#!/usr/bin/env python3
"""Compare the balancing rules on one badly skewed router: MaxVio per step, in a table and a picture.

    python tools/plot_balancing.py --output balancing.png

Every rule gets the same router and the same fresh tokens each step; no weight moves, only the bias. What it does not show:
training, in which the router's weights move too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Example: python tools/plot_balancing.py --steps 40 --experts 128 --json")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384, help="of one step; 1,024 per expert by default")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skew", type=float, default=1.3, help="standard deviation of the preference that all tokens share, in logits")
    parser.add_argument("--output", type=Path, default=Path("balancing.png"))
    parser.add_argument("--json", action="store_true", help="print the series instead of a table")
    args = parser.parse_args(argv)
    series = compare(args.experts, args.top_k, args.tokens, args.steps, args.skew)
    draw(series, args)
    if args.json:
        print(json.dumps(series))
        return 0
    print("step  " + "  ".join(f"{name:>10}" for name in series))
    for step in sorted({*range(6), args.steps - 1} & set(range(args.steps))):
        print(f"{step:4}  " + "  ".join(f"{values[step]:10.3f}" for values in series.values()))
    print(f"picture: {args.output}")
    return 0


def compare(experts: int, top_k: int, tokens: int, steps: int, skew: float, width: int = 32) -> dict[str, list[float]]:
    """MaxVio of every step, by rule; step 0 is routed with zero bias."""
    import torch

    from megamoe.layers.balance import update_router_biases
    from megamoe.layers.config import Balancing, MoEConfig
    from megamoe.layers.router import Router

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, width, generator=generator) * width**-0.5
    weight[:, 0] = torch.randn(experts, generator=generator) * skew
    series = {}
    for rule in Balancing:
        router = Router(width, MoEConfig(num_experts=experts, top_k=top_k, balancing=rule))
        with torch.no_grad():
            router.weight.copy_(weight)
        data, series[rule.name] = torch.Generator().manual_seed(1), []
        for _ in range(steps):
            x = torch.randn(tokens, width, generator=data)
            x[:, 0] = 1.0  # what makes column 0 of the weights a preference shared by all tokens
            with torch.no_grad():
                router.accumulate(router(x)[2])
            series[rule.name].append(update_router_biases(router).max_vio_L.item())
    return series


def draw(series: dict[str, list[float]], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for name, values in series.items():
        axes.semilogy(values, marker="o", markersize=3, label=f"{name}: {values[-1]:.2f} at the end")
    axes.set(xlabel="step", ylabel="MaxVio = largest load / mean − 1", title=f"{args.experts} experts, top-{args.top_k}, {args.tokens:,} tokens a step, skewed router")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
