#!/usr/bin/env python3
"""Prove that a parallel layout trains the same model as one rank, on this machine's CPU.

    python tools/prove_layout.py parallel.tp=2 parallel.pp=2 parallel.ep=4      # a shrunken copy of your configuration
    python tools/prove_layout.py --matrix --json proof.json                     # the whole list of layouts

Takes the trainer's Hydra overrides. Two optimizer steps with packed, uneven documents, masked tokens and a skewed router
run on the layout and on one rank, twice: `plain`, float64, limit 1e-10, and `deepspeed`, fp32 with SGD and an active clip,
limit 1e-6. With a pipeline, a second table has the bytes over every boundary: counted while it ran, and by the formulas with
and without cached AttnRes rows; counted bytes that differ from the cached formula fail the proof. Exit code 0 when everything passes, 1 when not, 2 for a configuration that cannot be proved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEADER = f"{'ranks':>5}  {'layout':26} {'model':12} {'other':22} {'engine':9} {'loss':>8} {'gradient':>8} {'norm':>8} {'routing':>8} {'weights':>8}  result"
TRAFFIC_HEADER = f"{'layout':26} {'model':12} {'engine':9} {'boundary':18} {'B forward':>10} {'B back':>10} {'cached':>10} {'naive':>10} {'ratio':>6}  result"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Other arguments are Hydra overrides, such as parallel.tp=2.")
    parser.add_argument("--matrix", action="store_true", help="prove the whole list of layouts instead of one configuration")
    parser.add_argument("--engine", choices=("both", "plain", "deepspeed"), default="both")
    parser.add_argument("--only", default="", help="with --matrix: layouts whose name or model contains this, such as pp4, cp2·tp2 or balanced")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a layout may take before it counts as hung")
    args, overrides = parser.parse_known_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After the arguments: --help should not wait for these.
    from launch.schema import compose
    from megamoe.testing.matrix import matrix
    from megamoe.testing.pool import RankPool
    from megamoe.testing.proof import Prover
    from megamoe.testing.shrink import shrink
    from megamoe.utils.errors import UserError

    if args.matrix:
        cases = [(name, case) for name, case in matrix() if args.only in f"{case.name} {name}"]
    else:
        try:
            config = compose(overrides)
            case, mapping = shrink(config)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{'':18} {'yours':>28}   proved here")
        for what, yours, proved in mapping:
            print(f"{what:18} {yours:>28}   {proved}")
        print()
        cases = [(config.model.name, case)]
    engines = ("plain", "deepspeed") if args.engine == "both" else (args.engine,)
    print(HEADER)
    rows, begin = [], time.monotonic()
    with RankPool(8) as pool:
        prover = Prover(pool.run, args.timeout)
        for name, case in cases:
            for engine in engines:
                row = _prove(prover, name, _for_engine(case, engine))
                rows.append(row)
                print(_line(row), flush=True)
    if any(r.get("boundaries") for r in rows):
        print(f"\n{TRAFFIC_HEADER}")
        for row in rows:
            print("\n".join(_traffic_lines(row)), end="\n" if row.get("boundaries") else "")
    failed = [r for r in rows if r["result"] != "PASS"]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} proofs pass ({len(cases)} layouts) in {time.monotonic() - begin:.0f} s")
    for row in failed:
        print(f"{row['result']}: {row['layout']} {row['model']} {row['engine']}: {row['detail']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if failed else 0


def _for_engine(case, engine: str):
    from megamoe.optim.config import OptimizerKind

    # Through DeepSpeed the update itself is compared, so it must show every error of gradient and norm: SGD does.
    return case if engine == "plain" else replace(case, engine=engine, optimizer=OptimizerKind.sgd)


def _prove(prover, name: str, case) -> dict:
    other = " ".join(filter(None, [case.optimizer.value, "" if case.recompute == "none" else f"recompute={case.recompute}", "" if case.packing else "unpacked", "uneven" if case.parallel.stage_layers else "", f"qk_tau={case.qk_tau}" if case.qk_tau else ""]))
    row = {"ranks": case.world, "layout": case.name, "model": name, "other": other, "engine": case.engine}
    try:
        v = prover.prove(case)
    except RuntimeError as error:
        return row | {"result": "ERROR", "detail": str(error).strip().splitlines()[-1]}
    sent = [f"boundary {b.chunk}→{b.chunk + 1} carried {b.forward} B forward and {b.backward} B back, not {b.cached} B" for b in v.boundaries if b.off]
    detail = "; ".join(sent) if sent else f"worst gradient {v.gradient_name}, worst weight {v.weights_name}"
    return row | {"loss": v.loss, "gradient": v.gradient, "norm": v.norm, "routing": v.bias, "weights": v.weights, "boundaries": [asdict(b) for b in v.boundaries], "result": "PASS" if v.passed else "FAIL", "detail": detail}


def _traffic_lines(row: dict) -> list[str]:
    """One line for each boundary: of all steps, micro-batches and ranks, one direction."""
    lines = []
    for b in row.get("boundaries", []):
        where = f"{b['chunk']}→{b['chunk'] + 1} (rank {b['ranks'][0]}→{b['ranks'][1]})"
        counted = "PASS" if b["forward"] == b["backward"] == b["cached"] else "FAIL"
        lines.append(f"{row['layout']:26} {row['model']:12} {row['engine']:9} {where:18} {b['forward']:>10} {b['backward']:>10} {b['cached']:>10} {b['naive']:>10} {b['naive'] / b['cached']:>6.2f}  {counted}")
    return lines


def _line(row: dict) -> str:
    figures = "".join(f" {'–' if row.get(k) is None else format(row[k], '.1e'):>8}" for k in ("loss", "gradient", "norm", "routing", "weights"))
    return f"{row['ranks']:>5}  {row['layout']:26} {row['model']:12} {row['other']:22} {row['engine']:9}{figures}  {row['result']}"


if __name__ == "__main__":
    sys.exit(main())
