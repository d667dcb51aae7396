"""What the checkpoint tools have in common: errors in one line, --json, and polite ends.

Exit codes: 0 done; 1 the tool looked and found a fault, or a run broke; 2 the input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable


def run_command(args: argparse.Namespace, overrides: list[str], work: Callable[[argparse.Namespace, list[str]], dict], show: Callable[[dict], str]) -> int:
    """Do the work and print its result.

    Args:
        overrides: arguments the parser did not know; those that look like options are refused here.
        work: returns facts; a true "faults" among them makes the exit code 1.
        show: the facts as text, for people.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(args, overrides, work, show)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace, overrides: list[str], work: Callable[[argparse.Namespace, list[str]], dict], show: Callable[[dict], str]) -> int:
    from megamoe.checkpoint.objects import StoreError
    from megamoe.utils.errors import RunFailed, UserError

    try:
        unknown = [a for a in overrides if a.startswith("-")]
        if unknown:
            raise UserError(f"{unknown[0]}: no such option; see --help")
        result = work(args, overrides)
    except UserError as error:
        for line in getattr(error, "lines", []):
            print(line, file=sys.stderr)
        # The reader speaks of the setting that names a checkpoint in training.
        print(f"error: {str(error).replace('run.resume=', 'checkpoint=', 1)}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was committed", file=sys.stderr)
        return 130
    try:
        print(json.dumps(_strict(result)) if args.json else show(result))
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` is a fair use of a long list; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if result.get("faults") else 0


def _strict(value: object) -> object:
    """NaN and infinities as text: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _interrupt(*_) -> None:
    raise KeyboardInterrupt
