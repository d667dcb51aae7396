"""The reference lines in every plot: if they were wrong, a model that learnt nothing could look good.

Not covered: that they are the best such lines; better smoothing would lower the bigram a little.
"""

import gzip
import lzma
import math
from collections import Counter

import numpy as np
import pytest

from megamoe.data.baselines import compressor_bits_per_byte, ngram_bits_per_byte, reference_bits_per_byte
from megamoe.data.config import DataConfig
from megamoe.data.corpus import text_hash
from megamoe.data.dataset import build_datasets


def build(corpus, cache, seq_len=64):
    config = DataConfig(source="indexed", paths=[str(corpus)], cache_dir=str(cache), holdout_fraction=0.3)
    return build_datasets(config, seq_len=seq_len, vocab_size=512, seed=1)


@pytest.fixture
def split(texts):
    heldout = [text for text in texts if text_hash(text) < 0.3 * 2**64]
    return [text for text in texts if text not in heldout], heldout


def streams(tokenizer, texts):
    return [[tokenizer.eod_id, *tokenizer.encode(text).tolist(), tokenizer.eod_id] for text in texts]


def test_ngram_lines_equal_a_count_by_hand(tmp_path, corpus, tokenizer, split):
    """Straight from the definitions, token by token, over the texts and not over windows."""
    train, heldout = (streams(tokenizer, texts) for texts in split)
    V = tokenizer.vocab_size
    unigram = Counter(token for stream in train for token in stream[1:])
    bigram = Counter(pair for stream in train for pair in zip(stream, stream[1:]))
    context = Counter(token for stream in train for token in stream[:-1])
    kinds = Counter(a for a, _ in bigram)
    total = sum(unigram.values())

    def p1(b):
        return (unigram[b] + 1) / (total + V)

    def p2(a, b):
        return (bigram[a, b] + kinds[a] * p1(b)) / (context[a] + kinds[a]) if context[a] else p1(b)

    for a in list(context)[:20] + [V - 1]:
        assert math.isclose(sum(p2(a, b) for b in range(V)), 1.0, rel_tol=1e-12), "a distribution in every context"
    num_bytes = sum(len(text.encode()) for text in split[1])
    pairs = [pair for stream in heldout for pair in zip(stream, stream[1:])]
    expected = {"unigram": -sum(math.log2(p1(b)) for _, b in pairs) / num_bytes, "bigram": -sum(math.log2(p2(a, b)) for a, b in pairs) / num_bytes}
    measured = ngram_bits_per_byte(*build(corpus, tmp_path))
    assert measured == pytest.approx(expected, rel=1e-12)
    assert measured["bigram"] < measured["unigram"]


def test_lines_do_not_depend_on_the_window_length(tmp_path, corpus):
    lines = [ngram_bits_per_byte(*build(corpus, tmp_path, seq_len)) for seq_len in (7, 64, 4096)]
    assert lines[0] == pytest.approx(lines[1], rel=1e-12) and lines[1] == pytest.approx(lines[2], rel=1e-12)


def test_compressors_see_the_held_out_text_and_nothing_else(tmp_path, corpus, split):
    text = "".join(split[1]).encode()
    measured = compressor_bits_per_byte(build(corpus, tmp_path)[1])
    assert measured["gzip"] == 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)
    assert measured["xz"] == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def test_lines_are_cached_under_all_they_depend_on(tmp_path, corpus, monkeypatch):
    train, heldout = build(corpus, tmp_path)
    lines = reference_bits_per_byte(train, heldout, tmp_path)
    assert sorted(lines) == ["bigram", "gzip", "unigram", "xz"] and all(np.isfinite(list(lines.values())))
    import megamoe.data.baselines as module

    monkeypatch.setattr(module, "ngram_bits_per_byte", lambda *_: pytest.fail("measured again"))
    assert reference_bits_per_byte(train, heldout, tmp_path) == lines
