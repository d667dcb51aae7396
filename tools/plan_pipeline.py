#!/usr/bin/env python3
"""Simulate a pipeline without a GPU: how layers are cut, bubble, activations kept per rank, bytes over every boundary.

    python tools/plan_pipeline.py model=k3_2p8t parallel.pp=8 parallel.vpp=3 --micro-batches 64

Takes the trainer's Hydra overrides; needs no torch. Times are multiply-adds per token (backward counts double), so the
bubble is that of perfectly overlapped communication; `--send` adds a delay per boundary as a share of a mean stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Other arguments are Hydra overrides, such as parallel.pp=4.")
    parser.add_argument("--micro-batches", type=int, default=0, help="of a step, per data-parallel rank; default: what the configuration gives on pp·tp·cp ranks")
    parser.add_argument("--send", type=float, default=0.0, help="time of a message as a share of a mean stage's forward")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args, overrides = parser.parse_known_args(argv)
    from launch.schema import compose
    from megamoe.utils.errors import UserError

    try:
        plan = simulate_pipeline(compose(overrides), args.micro_batches, args.send)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(plan) if args.json else table(plan))
    return 0


def simulate_pipeline(config, num_micro: int, send: float) -> dict:
    """Figures of one configuration. Keys ending in _bytes are bytes; costs are in multiply-adds per token."""
    from megamoe.parallel.schedule import one_f_one_b, simulate
    from megamoe.parallel.stages import check_layout, layer_costs, plan_stages

    model, parallel, seq_len = config.model, config.parallel, config.train.seq_len
    check_layout(model, parallel)
    plan = plan_stages(model, parallel, seq_len)
    layers, first, last = layer_costs(model, seq_len)
    cost = [sum(layers[n] for n in chunk) for chunk in plan.layers]
    cost[0] += first
    cost[-1] += last
    num_micro = num_micro or config.micro_batches_per_step(max(1, parallel.dp))
    mean = sum(cost) / len(cost)
    result = simulate(
        one_f_one_b(parallel.pp, num_micro, parallel.vpp),
        plan.num_chunks,
        forward_cost=lambda c: cost[c],
        backward_cost=lambda c: 2 * cost[c],
        send_cost=lambda b: send * mean,
        chunk_weight=lambda c: float(len(plan.layers[c])),
    )
    # One (T, D) tensor of a rank's shard in bf16; every boundary carries rows and the running sum, forward and backward.
    tensor_bytes = config.train.micro_batch_tokens // (parallel.cp * parallel.tp) * model.d_model * 2
    return {
        "model": model.name,
        "micro_batches": num_micro,
        "bubble": result.bubble,
        "even_bubble": simulate(one_f_one_b(parallel.pp, num_micro, parallel.vpp), plan.num_chunks).bubble,
        "max_in_flight": result.max_in_flight,
        "chunks": [
            {"chunk": c, "rank": c % parallel.pp, "layers": [r.start, r.stop - 1], "cost": cost[c], "share": cost[c] / sum(cost), "rows_after": plan.rows_after[c]}
            for c, r in enumerate(plan.layers)
        ],
        "ranks": [
            {"rank": r, "busy": result.busy[r] / result.makespan, "peak_live_layers": result.peak_live[r], "layers": sum(len(plan.layers[c]) for c in plan.chunks_of(r))}
            for r in range(parallel.pp)
        ],
        "boundaries": [
            {"boundary": b, "cached_bytes": cached * tensor_bytes, "naive_bytes": naive * tensor_bytes, "cached_tensors": cached, "naive_tensors": naive}
            for b, (cached, naive) in enumerate(zip(plan.tensors_per_boundary(), plan.tensors_per_boundary(cached=False)))
        ],
    }


def table(plan: dict) -> str:
    mib = lambda n: f"{n / 2**20:,.1f}"  # noqa: E731
    out = [f"{plan['model']}: {plan['micro_batches']} micro-batches, bubble {plan['bubble']:.1%} ({plan['even_bubble']:.1%} with even stages), at most {plan['max_in_flight']} messages in flight on a channel", ""]
    out += ["chunk  rank  layers      share of compute   AttnRes rows after"]
    out += [f"{c['chunk']:5}  {c['rank']:4}  {c['layers'][0]:3}–{c['layers'][1]:<3}  {c['share']:16.1%}   {c['rows_after']:10}" for c in plan["chunks"]]
    out += ["", "rank  busy    layers  layers × micro-batches kept at most"]
    out += [f"{r['rank']:4}  {r['busy']:5.1%}  {r['layers']:6}  {r['peak_live_layers']:10.0f}" for r in plan["ranks"]]
    out += ["", "boundary  tensors  MiB a micro-batch (bf16, one way)  sending every row"]
    out += [f"{b['boundary']:8}  {b['cached_tensors']:7}  {mib(b['cached_bytes']):>32}  {mib(b['naive_bytes']):>17}" for b in plan["boundaries"]]
    total = [sum(b[k] for b in plan["boundaries"]) for k in ("cached_bytes", "naive_bytes")]
    out.append(f"{'sum':>8}  {'':7}  {mib(total[0]):>32}  {mib(total[1]):>17}")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
