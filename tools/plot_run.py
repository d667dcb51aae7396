"""Draw a run: bits per byte with reference lines, learning rate, MaxVio per layer, expert load.

    python tools/plot_run.py runs/default
    python tools/plot_run.py runs/balancing_quantile runs/balancing_sign runs/balancing_none --output compare.png

Reads the run folder only, so it works beside a live run and without any account.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megamoe.monitor.metrics import read_metrics  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are laid over each other")
    parser.add_argument("--output", metavar="PNG", help="where the picture goes (default: plot.png in the first run folder)")
    parser.add_argument("--json", action="store_true", help="print path and last figures of each run as JSON")
    args = parser.parse_args(argv)
    try:
        from megamoe.monitor.plot import plot_run

        path = plot_run(*args.runs, out=args.output)
    except OSError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"plot": str(path), "runs": {run: read_metrics(run).rows[-1:] for run in args.runs}}))
    else:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
