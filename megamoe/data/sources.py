"""The kinds of source brought to one form: a tokenizer and prefixes of token files."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import xxhash

from megamoe.data.cache import cached_folder
from megamoe.data.config import DataConfig
from megamoe.data.corpus import stdlib_documents, text_hash, tokenizer_sample, write_encoded
from megamoe.data.inputs import find_inputs, plan_jobs
from megamoe.data.prepare import JOB_BYTES, prepare, recipe_of, sample_texts
from megamoe.data.rows import ChatRows, Rows, TextRows
from megamoe.data.stdlib_chat import stdlib_conversations
from megamoe.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from megamoe.utils.errors import UserError

log = logging.getLogger(__name__)

# Text that `auto` trains a tokenizer on. Merges of a vocabulary of 8K to 64K are settled by far less than a whole
# corpus, and training time grows with it: 12 MB take about 6 s on two cores.
TOKENIZER_SAMPLE_BYTES = 12_000_000

NamedPrefix = tuple[str, Path]


def token_files(config: DataConfig, vocab_size: int) -> tuple[Tokenizer, list[NamedPrefix], list[NamedPrefix]]:
    """Bring the configured source to token files.

    Args:
        config: what to read.
        vocab_size: of the model; a trained tokenizer takes it when config.vocab_size is 0.

    Returns:
        (tokenizer, named training prefixes, named held-out prefixes). The last is empty when the held-out documents
        are a part of the training files.
    """
    if config.source == "indexed":
        tokenizer = _tokenizer_of_indexed(config)
        return tokenizer, [(p, Path(p)) for p in config.paths], [(p, Path(p)) for p in config.heldout_paths]
    vocab_size = config.vocab_size or vocab_size
    if config.source in ("stdlib", "stdlib_chat"):
        return _stdlib(config, vocab_size)
    return _files(config, vocab_size)


def rows_of(config: DataConfig) -> Rows:
    """What a row of the configured source is."""
    return ChatRows(thinking=config.chat_mode == "thinking") if config.is_chat else TextRows(config.text_key)


def auto_tokenizer(sample: Sequence[str], vocab_size: int, cache_root: Path) -> Tokenizer:
    """Train a tokenizer on texts, once: cached by their content, the size and the library's version."""
    if not sample:
        raise UserError("empty corpus: no text to train a tokenizer on; check data.paths, or name one with data.tokenizer")
    if vocab_size < 257:
        raise UserError(f"model.vocab_size={vocab_size} is too small for a byte-level tokenizer: at least 257 (256 bytes and end of document)")
    corpus = xxhash.xxh3_128()
    for text in sample:
        corpus.update(text_hash(text).to_bytes(8, "little"))

    def build(folder: Path) -> None:
        log.info("training a tokenizer of %d ids on %.1f MB (once, cached)", vocab_size, sum(map(len, sample)) / 1e6)
        began = time.monotonic()
        train_tokenizer(sample, vocab_size, folder / "tokenizer.json")
        log.info("tokenizer trained in %.1f s", time.monotonic() - began)

    key = {"sample": corpus.hexdigest(), "vocab_size": vocab_size, "tokenizers": tokenizers.__version__, "format": 2}
    return load_tokenizer(cached_folder(cache_root, "tokenizers", key, build) / "tokenizer.json")


def _stdlib(config: DataConfig, vocab_size: int) -> tuple[Tokenizer, list[NamedPrefix], list[NamedPrefix]]:
    texts, skipped = stdlib_documents()
    cache_root = config.cache_path()
    if config.tokenizer == "auto":
        total_bytes = sum(len(text) for text in texts)
        sample = tokenizer_sample(texts, total_bytes, TOKENIZER_SAMPLE_BYTES, config.holdout_fraction)
        tokenizer = auto_tokenizer(list(sample), vocab_size, cache_root)
    else:
        tokenizer = load_tokenizer(config.tokenizer, special_tokens=config.special_tokens, eod_token=config.eod_token)
    corpus = xxhash.xxh3_128()
    for text in texts:
        corpus.update(text_hash(text).to_bytes(8, "little"))

    chat = config.source == "stdlib_chat"
    rows = rows_of(config)

    def build(folder: Path) -> None:
        if skipped:
            log.warning("left out %d of %d standard library files that are not UTF-8", skipped, skipped + len(texts))
        log.info("encoding %d standard library files (once, cached)", len(texts))
        began = time.monotonic()
        documents = rows.encode((("standard library", c) for c in stdlib_conversations(texts)) if chat else texts, tokenizer)
        counts = write_encoded(documents, tokenizer, folder / "corpus")
        log.info("%s tokens encoded in %.1f s", f"{counts['tokens']:,}", time.monotonic() - began)

    key = {"source": config.source, "corpus": corpus.hexdigest(), "tokenizer": tokenizer.fingerprint, "format": 1} | ({"rows": rows.facts()} if chat else {})
    return tokenizer, [("python standard library's documentation" if chat else "python standard library", cached_folder(cache_root, "corpora", key, build) / "corpus")], []


def _files(config: DataConfig, vocab_size: int) -> tuple[Tokenizer, list[NamedPrefix], list[NamedPrefix]]:
    cache_root, rows = config.cache_path(), rows_of(config)
    jobs_of = {path: plan_jobs(find_inputs([path]), JOB_BYTES) for path in [*config.paths, *config.heldout_paths]}
    if config.tokenizer == "auto":
        train_jobs = [job for path in config.paths for job in jobs_of[path]]
        tokenizer = auto_tokenizer(sample_texts(train_jobs, rows, TOKENIZER_SAMPLE_BYTES), vocab_size, cache_root)
    else:
        tokenizer = load_tokenizer(config.tokenizer, special_tokens=config.special_tokens, eod_token=config.eod_token)

    def encoded(path: str) -> NamedPrefix:
        jobs = jobs_of[path]
        recipe = recipe_of(jobs, tokenizer, rows)

        def build(folder: Path) -> None:
            log.info("encoding %s (once, cached)", path)
            # Parts lie outside the scratch folder, which a killed build loses.
            parts = cache_root / "parts" / recipe
            counts = prepare(jobs, folder / "corpus", tokenizer, rows=rows, workers=config.num_workers, parts=parts)
            log.info("%s tokens encoded in %.1f s", f"{counts['tokens']:,}", counts["seconds"])

        return path, cached_folder(cache_root, "corpora", {"source": config.source, "recipe": recipe, "format": 1}, build) / "corpus"

    return tokenizer, [encoded(path) for path in config.paths], [encoded(path) for path in config.heldout_paths]


def _tokenizer_of_indexed(config: DataConfig) -> Tokenizer:
    if config.tokenizer != "auto":
        return load_tokenizer(config.tokenizer, special_tokens=config.special_tokens, eod_token=config.eod_token)
    prefix = config.paths[0].removesuffix(".idx").removesuffix(".bin")
    if not Path(f"{prefix}.idx").is_file():
        raise UserError(f"data path {prefix}.idx does not exist; data.paths takes prefixes, `corpus` for corpus.bin and corpus.idx")
    for suffix in (".tokenizer.json", ".tokenizer.tiktoken"):
        if Path(f"{prefix}{suffix}").is_file():
            side = Path(f"{prefix}.megamoe.json")
            eod_token = json.loads(side.read_text()).get("eod_token", "") if side.is_file() else ""
            return load_tokenizer(f"{prefix}{suffix}", special_tokens=config.special_tokens, eod_token=config.eod_token or eod_token)
    raise UserError(f"{prefix} has no tokenizer beside it (it was not made by tools/prepare_data.py); name the one it was made with in data.tokenizer")
