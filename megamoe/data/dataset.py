"""From a DataConfig to two datasets of windows, train and held out: tokenizer, token files, split, packing, order."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megamoe.data.batch import IGNORE_LABEL, Window
from megamoe.data.cache import cached_folder
from megamoe.data.config import DataConfig
from megamoe.data.corpus import heldout_mask
from megamoe.data.documents import Documents, check_ids, document_facts
from megamoe.data.indexed import IndexedDataset
from megamoe.data.packing import PackingIndex, pack_best_fit, pack_concat
from megamoe.data.sampler import BLEND_CYCLE, BlendOrder, Order, SweepOrder
from megamoe.data.sources import token_files
from megamoe.data.tokenizer import Tokenizer
from megamoe.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedSource:
    """Documents of one file and the windows they are packed into."""

    name: str
    documents: Documents
    index: PackingIndex


class WindowDataset:
    """Windows of seq_len by sample index. Reading one is a pure function of the index: no state, safe from any thread.

    Attributes:
        tokenizer: of the token files.
        seq_len: positions per window.
        bytes_per_token_table: (tokenizer.vocab_size,) int32, bytes of text of each id.
        sources: what it draws from.
    """

    def __init__(self, sources: list[PackedSource], order: Order, tokenizer: Tokenizer, seq_len: int, weights: list[float], order_facts: dict):
        self.sources = sources
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.bytes_per_token_table = tokenizer.bytes_per_token_V()
        self._order = order
        self._weights = weights
        self._order_facts = order_facts

    def __len__(self) -> int:
        """Windows in one pass over every source. Training may ask for any index: passes follow one another, reshuffled."""
        return sum(source.index.num_windows for source in self.sources)

    def window(self, index: int) -> Window:
        """Sample number `index` ≥ 0.

        Raises:
            UserError: the token file holds an id that the tokenizer does not have.
        """
        source_index, w = self._order.locate(index)
        source = self.sources[source_index]
        packing = source.index
        tokens = np.full(self.seq_len, self.tokenizer.eod_id, np.int64)
        labels = np.full(self.seq_len, IGNORE_LABEL, np.int64)
        starts = []
        at = 0
        for piece in range(int(packing.piece_offset_W[w]), int(packing.piece_offset_W[w + 1])):
            length = int(packing.length_P[piece])
            presented = source.documents.read(int(packing.document_P[piece]), int(packing.start_P[piece]), length)
            check_ids(presented, self.tokenizer, source.documents.indexed.prefix)
            tokens[at : at + length] = presented[:-1]
            counted = source.documents.counted(int(packing.document_P[piece]), int(packing.start_P[piece]), length)
            labels[at : at + length] = presented[1:] if counted is None else np.where(counted, presented[1:], IGNORE_LABEL)
            starts.append(at)
            at += length
        if at < self.seq_len:
            starts.append(at)
        num_bytes = int(self.bytes_per_token_table[labels[labels != IGNORE_LABEL]].sum(dtype=np.int64))
        return Window(tokens, labels, np.array(starts, np.int64), num_bytes)

    def describe(self) -> dict:
        """Facts for the first screen and the run folder, JSON-able: per source and in all."""
        share = np.asarray(self._weights) / sum(self._weights)
        rows = [
            {
                "name": source.name,
                "share": float(weight),
                "documents": int(np.count_nonzero(source.documents.tokens_n)),
                "tokens": source.index.num_pairs,
                "bytes": source.documents.num_bytes,
                "windows": source.index.num_windows,
                "fill": source.index.num_pairs / (source.index.num_windows * self.seq_len),
            }
            for source, weight in zip(self.sources, share)
        ]
        totals = {key: sum(row[key] for row in rows) for key in ("documents", "tokens", "bytes", "windows")}
        return {"sources": rows, **totals, "seq_len": self.seq_len, "vocab_size": self.tokenizer.vocab_size, "tokenizer": self.tokenizer.fingerprint}

    def summary(self) -> list[str]:
        """`describe` as lines for a person."""
        facts = self.describe()
        lines = [
            f"{row['share']:6.1%}  {row['name']}: {row['documents']:,} documents, {row['tokens']:,} tokens, {row['bytes'] / 1e6:,.1f} MB, "
            f"{row['windows']:,} windows of {self.seq_len:,} ({row['fill']:.1%} full)"
            for row in facts["sources"]
        ]
        ratio = facts["bytes"] / max(facts["tokens"], 1)
        return [*lines, f"tokenizer {facts['tokenizer'][:12]}: {facts['vocab_size']:,} ids, {ratio:.2f} bytes per token"]

    def identity(self) -> dict[str, str]:
        """Hashes that must match for a resume to see the same samples: `tokenizer`, `blend` (texts and shares), `order`."""
        texts = [xxhash.xxh3_128_hexdigest(np.ascontiguousarray(source.documents.hash_n)) for source in self.sources]
        return {"tokenizer": self.tokenizer.fingerprint, "blend": _digest([texts, self._weights]), "order": _digest({**self._order_facts, "seq_len": self.seq_len})}


def build_datasets(config: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> tuple[WindowDataset, WindowDataset | None]:
    """Train and held-out datasets; what they need is built on first use and cached.

    Every rank may call this at the same time: the processes of a host wait for the one that builds.

    Args:
        config: what to read.
        seq_len: positions per window.
        vocab_size: of the model: the largest id must fit.
        seed: the run's seed, used where config.seed is -1.

    Returns:
        (train, held out). The second is None when nothing is held out. Held-out windows are shuffled once and for
        all, so that windows 0 … k−1 are a fair sample for any k, and the same one in every evaluation.

    Raises:
        UserError: anything wrong with the paths, the files, the tokenizer or the vocabulary.
    """
    if seq_len < 1:
        raise UserError(f"train.seq_len={seq_len} must be at least 1")
    seed = config.seed if config.seed >= 0 else seed
    cache_root = config.cache_path()
    tokenizer, prefixes, heldout_prefixes = token_files(config, vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} ids ({tokenizer.path}); "
            f"set model.vocab_size={tokenizer.vocab_size} or choose another data.tokenizer"
        )

    train_documents, heldout_documents = [], []
    for name, prefix in prefixes:
        indexed = IndexedDataset(prefix)
        facts = document_facts(indexed, tokenizer, cache_root)
        held = heldout_mask(facts.hash_n, 0.0 if heldout_prefixes else config.holdout_fraction)
        train_documents.append((name, Documents(indexed, facts, np.flatnonzero(~held), tokenizer.eod_id)))
        heldout_documents.append((name, Documents(indexed, facts, np.flatnonzero(held), tokenizer.eod_id)))
    if heldout_prefixes:
        heldout_documents = []
        for name, prefix in heldout_prefixes:
            indexed = IndexedDataset(prefix)
            facts = document_facts(indexed, tokenizer, cache_root)
            heldout_documents.append((name, Documents(indexed, facts, np.arange(indexed.num_documents), tokenizer.eod_id)))

    packing = {"packing": config.packing, "window_documents": config.packing_window_documents, "seed": seed}
    train = [PackedSource(name, documents, _packed(documents, seq_len, packing, cache_root)) for name, documents in train_documents]
    for source in train:
        if not source.index.num_windows:
            raise UserError(f"data source {source.name} has no training document with text (empty corpus); check its path, or lower data.holdout_fraction")
    sizes = [source.index.num_windows for source in train]
    weights = list(config.weights) or [float(size) for size in sizes]
    train_set = WindowDataset(train, BlendOrder(sizes, weights, seed), tokenizer, seq_len, weights, {**packing, "cycle": BLEND_CYCLE})

    heldout = [PackedSource(name, documents, _packed(documents, seq_len, {**packing, "seed": 0}, cache_root)) for name, documents in heldout_documents]
    heldout = [source for source in heldout if source.index.num_windows]
    if not heldout:
        if config.holdout_fraction > 0 or heldout_prefixes:
            log.warning("no document is held out, so there is no evaluation: raise data.holdout_fraction or give data.heldout_paths")
        return train_set, None
    sizes = [source.index.num_windows for source in heldout]
    # Seed 0 whatever the run's seed: evaluations of different runs compare on the same windows.
    return train_set, WindowDataset(heldout, SweepOrder(sizes, 0), tokenizer, seq_len, [float(s) for s in sizes], {**packing, "seed": 0})


def _packed(documents: Documents, seq_len: int, packing: dict, cache_root: Path) -> PackingIndex:
    pairs_n = documents.pairs_n
    if documents.has_targets:
        # The rest of a conversation without its beginning teaches nothing true, so what is too long loses its end.
        too_long = int(np.count_nonzero(pairs_n > seq_len))
        if too_long:
            log.warning("%d of %d conversations of %s are longer than train.seq_len=%d and lose their end", too_long, len(documents), documents.indexed.prefix, seq_len)
        pairs_n = np.minimum(pairs_n, seq_len)

    def build(folder: Path) -> None:
        if packing["packing"] == "concat":
            index = pack_concat(pairs_n, seq_len, seed=packing["seed"])
        else:
            index = pack_best_fit(pairs_n, seq_len, seed=packing["seed"], window_documents=packing["window_documents"])
        index.save(folder)

    # The lengths are all that packing sees, so they are the key: any source with the same lengths packs the same way.
    key = {"pairs": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(pairs_n)), "seq_len": seq_len, "format": 1, **packing}
    return PackingIndex.load(cached_folder(cache_root, "packing", key, build))


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
