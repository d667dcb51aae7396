"""Lines a model must pass before it has learnt anything: unigram, bigram, gzip and xz bits per byte of the held-out text.

All four count what the model's own figure counts: every held-out target, end of document included, over the bytes of
text. Letter: V vocabulary size.
"""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megamoe.data.batch import IGNORE_LABEL
from megamoe.data.cache import cached_folder
from megamoe.data.dataset import WindowDataset

log = logging.getLogger(__name__)

# Enough to settle the counts; a larger corpus is sampled by its own window order.
_MAX_TRAIN_TOKENS = 64_000_000
_MAX_HELDOUT_TOKENS = 4_000_000


def reference_bits_per_byte(train: WindowDataset, heldout: WindowDataset, cache_root: Path) -> dict[str, float]:
    """Reference lines, cached.

    Returns:
        {"unigram", "bigram", "gzip", "xz"}: bits per byte of the held-out text.
            unigram: token frequencies of the training split, add-one smoothed.
            bigram: token pairs of the training split, interpolated with the unigram by Witten and Bell's weights.
            gzip, xz: each at its strongest level over the held-out documents joined together; they see no training text.
    """

    def build(folder: Path) -> None:
        log.info("measuring reference lines: unigram, bigram, gzip, xz (once, cached)")
        began = time.monotonic()
        lines = {**ngram_bits_per_byte(train, heldout), **compressor_bits_per_byte(heldout)}
        (folder / "lines.json").write_text(json.dumps(lines))
        log.info("reference lines measured in %.1f s", time.monotonic() - began)

    key = {"train": train.identity(), "heldout": heldout.identity(), "caps": [_MAX_TRAIN_TOKENS, _MAX_HELDOUT_TOKENS], "format": 1}
    return json.loads((cached_folder(cache_root, "baselines", key, build) / "lines.json").read_text())


def ngram_bits_per_byte(train: WindowDataset, heldout: WindowDataset) -> dict[str, float]:
    """{"unigram", "bigram"} of the held-out targets under counts from the training targets."""
    V = train.tokenizer.vocab_size
    unigram_V = np.zeros(V, np.int64)
    codes = []
    for inputs, labels in _pairs(train, _MAX_TRAIN_TOKENS):
        unigram_V += np.bincount(labels, minlength=V)
        codes.append(inputs * V + labels)
    # Sorted distinct pairs with their counts; as a code, a pair is its place in the V×V table that is never built.
    pair, pair_count = np.unique(np.concatenate(codes), return_counts=True)
    first = pair // V
    seen_V = np.bincount(first, weights=pair_count, minlength=V)  # how often each token is a context
    kinds_V = np.bincount(first, minlength=V)  # how many different tokens follow it
    logged_V = np.log2(unigram_V + 1.0) - math.log2(int(unigram_V.sum()) + V)
    p_unigram_V = np.exp2(logged_V)

    bits_unigram = bits_bigram = 0.0
    num_bytes = 0
    for inputs, labels in _pairs(heldout, _MAX_HELDOUT_TOKENS):
        bits_unigram -= float(logged_V[labels].sum())
        code = inputs * V + labels
        at = np.minimum(np.searchsorted(pair, code), len(pair) - 1)
        count = np.where(pair[at] == code, pair_count[at], 0)
        # Witten and Bell: a context gives up as much mass as it has shown different continuations. A context never
        # seen gives up all of it, so the probabilities of each context sum to one.
        seen, kinds = seen_V[inputs], kinds_V[inputs]
        p = np.where(seen > 0, (count + kinds * p_unigram_V[labels]) / np.maximum(seen + kinds, 1), p_unigram_V[labels])
        bits_bigram -= float(np.log2(p).sum())
        num_bytes += int(heldout.bytes_per_token_table[labels].sum(dtype=np.int64))
    return {"unigram": bits_unigram / num_bytes, "bigram": bits_bigram / num_bytes}


def compressor_bits_per_byte(heldout: WindowDataset) -> dict[str, float]:
    """{"gzip", "xz"} of the held-out documents, joined in file order."""
    documents = ((source.documents, d) for source in heldout.sources for d in range(len(source.documents)))
    texts, num_tokens = [], 0
    for of, d in documents:
        tokens = of.tokens(d)
        texts.append(heldout.tokenizer.decode(tokens).encode())
        num_tokens += len(tokens)
        if num_tokens >= _MAX_HELDOUT_TOKENS:
            break
    text = b"".join(texts)
    packed = {"gzip": gzip.compress(text, 9, mtime=0), "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)}
    return {name: 8 * len(data) / len(text) for name, data in packed.items()}


def _pairs(dataset: WindowDataset, max_tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(inputs, labels) of the first len(dataset) windows in chunks: each pair once, or in the blend's shares for a weighted blend."""
    num_windows = min(len(dataset), -(-max_tokens // dataset.seq_len))
    per_chunk = max(1, (1 << 20) // dataset.seq_len)
    for begin in range(0, num_windows, per_chunk):
        windows = [dataset.window(i) for i in range(begin, min(num_windows, begin + per_chunk))]
        labels = np.concatenate([w.labels for w in windows])
        target = labels != IGNORE_LABEL
        yield np.concatenate([w.tokens for w in windows])[target], labels[target]
