#!/usr/bin/env python
"""Turn text files, .jsonl(.gz/.zst) and Parquet into a Megatron .bin/.idx pair that `data.source=indexed` reads.

Stop it at any time and run the same command again: finished parts are found, the result is the same to the byte.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

JOB_MB = 16.0

EXAMPLE = """\
example:
  python tools/prepare_data.py --input corpus/*.jsonl.zst notes/ --output tokens/corpus --workers 8
  deepspeed launch/pretrain.py data.source=indexed 'data.paths=[tokens/corpus]'
  python tools/prepare_data.py --chat thinking --input chats.jsonl --tokenizer runs/base --output tokens/chats

output:
  PREFIX.bin, PREFIX.idx      the tokens; Megatron reads them too
  PREFIX.documents.npz        hash and bytes of each document, for the held-out split and bits per byte
  PREFIX.megamoe.json         counts, tokenizer fingerprint
  PREFIX.targets              with --chat: which tokens carry loss
  PREFIX.tokenizer.*          the tokenizer; `data.tokenizer=auto` finds it
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files and folders, in this order; .txt .md .rst .py .jsonl .jsonl.gz .jsonl.zst .parquet")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the result without suffix")
    parser.add_argument("--tokenizer", default="auto", metavar="auto|PATH", help="tokenizer.json, tiktoken rank file, folder with one, or auto: train one on a sample of the input (default)")
    parser.add_argument("--vocab-size", type=int, default=32768, metavar="N", help="ids of the tokenizer that auto trains (default 32768)")
    parser.add_argument("--eod-token", default="", metavar="NAME", help="end-of-document token, where the tokenizer's is of no known name")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field or column that holds the text (default text)")
    parser.add_argument("--chat", choices=("thinking", "instruct"), help="rows are conversations: {\"messages\": [{\"role\": …, \"content\": …}, …]}; with or without think channel")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes; 0 is one per CPU core (default); does not change the result")
    parser.add_argument("--part-mb", type=float, default=JOB_MB, metavar="MB", help=f"input per restartable part (default {JOB_MB}); does not change the result")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="where auto keeps trained tokenizers (default MEGAMOE_CACHE or ~/.cache/megamoe)")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that was made from other input")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object on standard output")
    return parser.parse_args(argv)


class PlainProgress:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, total_bytes: int):
        self._total = max(total_bytes, 1)
        self._done = 0
        self._began = self._said = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said >= 5:
            self._said = now
            rate = self._done / (now - self._began)
            left_s = (self._total - self._done) / max(rate, 1)
            print(f"{self._done / self._total:6.1%}  {rate / 1e6:.1f} MB/s  {left_s:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class BarProgress:
    """A bar on a terminal."""

    def __init__(self, total_bytes: int):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("encoding"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("", total=total_bytes)

    def __call__(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()


def run(args: argparse.Namespace) -> dict:
    from megamoe.data.config import DataConfig
    from megamoe.data.inputs import find_inputs, plan_jobs
    from megamoe.data.prepare import input_bytes, prepare, sample_texts
    from megamoe.data.rows import ChatRows, TextRows
    from megamoe.data.sources import TOKENIZER_SAMPLE_BYTES, auto_tokenizer
    from megamoe.data.tokenizer import load_tokenizer
    from megamoe.utils.errors import check

    check(args.part_mb > 0, "--part-mb", args.part_mb, "must be above 0")
    check(args.workers >= 0, "--workers", args.workers, "must be 0 (one per CPU core) or more")
    output = Path(args.output).expanduser()
    output = output.parent.resolve() / output.name.removesuffix(".bin").removesuffix(".idx")
    jobs = plan_jobs(find_inputs(args.input), int(args.part_mb * 1e6))
    rows = ChatRows(thinking=args.chat == "thinking") if args.chat else TextRows(args.text_key)
    if args.tokenizer == "auto":
        cache = DataConfig(cache_dir=args.cache_dir) if args.cache_dir else DataConfig()
        tokenizer = auto_tokenizer(sample_texts(jobs, rows, TOKENIZER_SAMPLE_BYTES), args.vocab_size, cache.cache_path())
    else:
        tokenizer = load_tokenizer(args.tokenizer, eod_token=args.eod_token)
    with (BarProgress if sys.stderr.isatty() else PlainProgress)(sum(map(input_bytes, jobs))) as progress:
        counts = prepare(jobs, output, tokenizer, rows=rows, workers=args.workers, overwrite=args.overwrite, on_bytes=progress)
    return {"output": str(output), "tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, **counts}


def _interrupt(*_) -> None:
    """SIGTERM unwinds like Ctrl-C; its default action would leave workers behind without a word."""
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _interrupt)
    from megamoe.utils.errors import UserError

    try:
        result = run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; finished parts are kept, run the same command again to continue", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    else:
        reused = f", {result['reused_jobs']} of {result['jobs']} parts found finished" if result["reused_jobs"] else ""
        print(
            f"{result['output']}: {result['documents']:,} documents, {result['tokens']:,} tokens from {result['bytes'] / 1e6:,.1f} MB of text, "
            f"{result['vocab_size']:,} ids, {result['seconds']:.1f} s{reused}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
