"""Lay runs that should agree over each other, and say how far apart they are.

    python tools/compare_runs.py runs/one runs/tp2_pp2 runs/ep4 --output layouts.png
    python tools/compare_runs.py runs/one runs/one_other_batch_cut runs/tp2_pp2 --noise runs/one_other_batch_cut --factor 3

The first run is the reference. With `--noise RUN` the exit status is 1 when another run's mean distance is more than
`--factor` times that run's: it is the same layout with its sums taken in another order, so its distance is what bf16 costs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megamoe.monitor.compare import as_json, compare_runs, plot_comparison, table  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", metavar="RUN", help="run folder that the others are held against")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--noise", metavar="RUN", help="one of RUN: its distance counts as noise")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times the noise is still noise (default 3)")
    parser.add_argument("--output", metavar="PNG", help="draw the curves")
    parser.add_argument("--json", action="store_true", help="print the distances as JSON")
    args = parser.parse_args(argv)
    if args.noise is not None and args.noise not in args.runs:
        parser.error(f"--noise {args.noise}: must be one of the runs given")
    try:
        distances = compare_runs(args.reference, *args.runs)
        if args.output:
            plot_comparison(args.output, args.reference, *args.runs, noise=args.noise)
    except (OSError, ValueError) as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    print(as_json(distances) if args.json else table(args.reference, distances))
    if args.noise is None:
        return 0
    noise = distances[args.runs.index(args.noise)].mean_difference
    too_far = [d.run for d in distances if d.mean_difference > args.factor * noise]
    if too_far:
        print(f"compare_runs: farther than {args.factor:g} x the noise of {noise:.2e}: {', '.join(too_far)}", file=sys.stderr)
    return 1 if too_far else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
