"""The user's files to a token file: several processes, exact, restartable.

Each job writes a shard of its own into a folder of parts, under a name that is the hash of all it depends on, and a
shard appears by one rename. A run that was killed finds its finished shards again and does the rest; the shards are
joined in the order of the inputs, so neither workers nor interruptions can change a byte of the result.
"""

from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import json
import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
import xxhash

from megamoe.data.corpus import TargetsWriter, open_targets, text_hash, write_encoded, write_side_files
from megamoe.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megamoe.data.inputs import Piece
from megamoe.data.rows import Rows, TextRows
from megamoe.data.sampler import Permutation
from megamoe.data.tokenizer import Tokenizer, load_tokenizer
from megamoe.utils.errors import UserError

log = logging.getLogger(__name__)

Job = tuple[Piece, ...]

# About ten seconds of one core: what a killed run can lose per worker, and the step of the progress bar.
JOB_BYTES = 16 << 20
# Documents whose hash lies below this share of the range never train a tokenizer: they are what runs hold out.
_NOT_FOR_TOKENIZER = 0.1


def recipe_of(jobs: Sequence[Job], tokenizer: Tokenizer, rows: Rows) -> str:
    """Hash of everything the result depends on: files in order, tokenizer, kind of row. How jobs are cut is not part of it."""
    files = list(dict.fromkeys((piece.path, piece.size, piece.mtime_ns) for job in jobs for piece in job))
    return xxhash.xxh3_128_hexdigest(json.dumps([files, tokenizer.fingerprint, rows.facts(), 1]).encode())


def prepare(
    jobs: Sequence[Job],
    output: Path,
    tokenizer: Tokenizer,
    *,
    rows: Rows = TextRows(),
    workers: int = 0,
    parts: Path | None = None,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict:
    """Encode jobs to OUTPUT.bin/.idx with side files and a copy of the tokenizer.

    Args:
        jobs: from `plan_jobs`.
        output: prefix; its folder is created.
        tokenizer: gives ids.
        rows: what a row of the input is.
        workers: processes; 0 means one per CPU core. The result does not depend on it.
        parts: folder of finished shards, OUTPUT.parts by default; removed at the end.
        overwrite: replace an OUTPUT that was made from something else.
        on_bytes: called with the input bytes of each finished job.

    Returns:
        {"documents", "tokens", "bytes", "recipe", "reused_jobs", "jobs", "seconds"}

    Raises:
        UserError: bad input, no text at all, an output made from something else, another writer, a full or read-only
            disk. Finished shards stay for the next run; OUTPUT appears only when whole.
    """
    began = time.monotonic()
    recipe = recipe_of(jobs, tokenizer, rows)
    done = _finished(output, recipe)
    if done:
        on_bytes(sum(input_bytes(job) for job in jobs))
        return {**done, "reused_jobs": len(jobs), "jobs": len(jobs), "seconds": time.monotonic() - began}
    if not overwrite and any(Path(f"{output}{suffix}").exists() for suffix in (".bin", ".idx")):
        raise UserError(f"{output}.bin or .idx exists and was made from something else; choose another output, or pass --overwrite")
    parts = parts or Path(f"{output}.parts")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        parts.mkdir(parents=True, exist_ok=True)
        with open(parts / "lock", "a") as lock:
            _lock_or_refuse(lock, output)
            for left_over in parts.glob("*.tmp-*"):
                left_over.unlink(missing_ok=True)
            try:
                reused = _encode_jobs(jobs, parts, tokenizer, rows, workers, on_bytes)
                counts = _join(jobs, parts, output, tokenizer, rows, recipe)
            except UserError:
                if not any(parts.glob("*.idx")):
                    shutil.rmtree(parts)
                raise
            shutil.rmtree(parts)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR):
            raise UserError(f"{output} cannot be written: {error.strerror}; free space or choose another output, then run again to continue") from error
        raise
    return {**counts, "recipe": recipe, "reused_jobs": reused, "jobs": len(jobs), "seconds": time.monotonic() - began}


def sample_texts(jobs: Sequence[Job], rows: Rows, target_bytes: int) -> list[str]:
    """Texts to train a tokenizer on: about `target_bytes` in all, an equal part from each of up to 64 jobs."""
    chosen = [jobs[i] for i in Permutation(len(jobs), 0).many(np.arange(min(64, len(jobs))))] if jobs else []
    texts: list[str] = []
    spare: list[str] = []
    for job in chosen:
        size = 0
        for text in (rows.text(row) for piece in job for row in rows.read(piece)):
            if text_hash(text) < _NOT_FOR_TOKENIZER * 2**64:
                # A corpus of a document or two may hold nothing else.
                spare = spare or [text]
                continue
            texts.append(text)
            size += len(text)
            if size * len(chosen) >= target_bytes:
                break
    return texts or spare


def _finished(output: Path, recipe: str) -> dict | None:
    side = Path(f"{output}.megamoe.json")
    if not (side.is_file() and Path(f"{output}.idx").is_file()):
        return None
    facts = json.loads(side.read_text())
    return {key: facts[key] for key in ("documents", "tokens", "bytes", "recipe")} if facts.get("recipe") == recipe else None


def _lock_or_refuse(lock, output: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{output} is being written by another process; wait for it or choose another output") from error


def _shard_name(job: Job, fingerprint: str, rows: Rows) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([[astuple(piece) for piece in job], fingerprint, rows.facts(), 1]).encode())


def input_bytes(job: Job) -> int:
    """Input bytes of a job; a Parquet row group counts as nothing here, its file is counted by its first one."""
    return sum(
        (piece.size if piece.begin == 0 else 0) if piece.path.endswith(".parquet") else piece.end - piece.begin for piece in job
    )


def _encode_jobs(jobs: Sequence[Job], parts: Path, tokenizer: Tokenizer, rows: Rows, workers: int, on_bytes: Callable[[int], None]) -> int:
    """Write the shards that are not there yet. Returns how many were."""
    todo: dict[Path, Job] = {}
    reused = 0
    for job in jobs:
        shard = parts / _shard_name(job, tokenizer.fingerprint, rows)
        if Path(f"{shard}.idx").is_file():
            reused += 1
            on_bytes(input_bytes(job))
        else:
            todo[shard] = job
    workers = min(workers or os.cpu_count() or 1, len(todo))
    if workers <= 1:
        for shard, job in todo.items():
            _encode_job(job, shard, tokenizer, rows)
            on_bytes(input_bytes(job))
        return reused
    stem = tokenizer.save(parts / "workers")
    # Spawned, not forked: the caller may have threads (a tokenizer's, torch's), which a forked child would miss.
    with concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (stem, tokenizer.special_tokens, tokenizer.eod_token, os.getpid())
    ) as pool:
        try:
            # Submitting is what spawns: workers inherit the blocked Ctrl-C, or one that is still importing would die with a traceback.
            # The tracker is started first, because its start unblocks the signal.
            multiprocessing.resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                running = {pool.submit(_encode_job_in_worker, job, shard, rows): job for shard, job in todo.items()}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for future in concurrent.futures.as_completed(running):
                future.result()
                on_bytes(input_bytes(running[future]))
        except concurrent.futures.process.BrokenProcessPool as error:
            raise UserError("a worker process died, perhaps for lack of memory; run again to continue, with fewer workers") from error
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return reused


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_path: Path, special_tokens: dict[str, int], eod_token: str, parent: int) -> None:
    global _worker_tokenizer
    os.environ["RAYON_NUM_THREADS"] = "1"
    # Ctrl-C reaches the whole process group; the parent decides, and a worker finishes its shard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_tokenizer = load_tokenizer(tokenizer_path, special_tokens=special_tokens, eod_token=eod_token)

    def leave_with_parent() -> None:
        # A killed parent says nothing to its pool, and workers would wait for the next job for ever.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _encode_job_in_worker(job: Job, shard: Path, rows: Rows) -> None:
    assert _worker_tokenizer is not None
    _encode_job(job, shard, _worker_tokenizer, rows)


def _encode_job(job: Job, shard: Path, tokenizer: Tokenizer, rows: Rows) -> None:
    write_encoded(rows.encode((row for piece in job for row in rows.read(piece)), tokenizer), tokenizer, shard, allow_empty=True)


def _join(jobs: Sequence[Job], parts: Path, output: Path, tokenizer: Tokenizer, rows: Rows, recipe: str) -> dict[str, int]:
    hashes, sizes, num_tokens = [], [], 0
    with IndexedWriter(output, token_dtype(tokenizer.vocab_size)) as writer, TargetsWriter(output) as targets:
        for job in jobs:
            shard = parts / _shard_name(job, tokenizer.fingerprint, rows)
            pair = IndexedDataset(shard)
            writer.add_pair(pair)
            num_tokens += pair.num_tokens
            counted = open_targets(pair)
            if counted is not None:
                targets.add(counted)
            with np.load(f"{shard}.documents.npz") as side:
                hashes.append(side["hash"])
                sizes.append(side["bytes"])
        hash_n = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        bytes_n = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
        if not len(hash_n):
            inputs = sorted({piece.path for job in jobs for piece in job})
            for shard in parts.glob("*.idx"):
                shard.unlink()
            raise UserError(f"empty corpus: no text in {inputs[0] if inputs else 'the inputs'}{f' and {len(inputs) - 1} more' if len(inputs) > 1 else ''}")
        counts = {"documents": len(hash_n), "tokens": num_tokens, "bytes": int(bytes_n.sum())}
        tokenizer.save(output)
        write_side_files(output, hash_n, bytes_n, tokenizer, {**counts, "recipe": recipe, "eod_token": tokenizer.eod_token})
        targets.finish()
        writer.finish()
    return counts
