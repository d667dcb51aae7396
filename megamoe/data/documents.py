"""The documents of one token file as the packer sees them: lengths, hashes, and slices of [eod] + tokens + [eod].

Letter: n documents.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megamoe.data.cache import cached_folder
from megamoe.data.corpus import open_targets
from megamoe.data.indexed import IndexedDataset
from megamoe.data.tokenizer import Tokenizer
from megamoe.utils.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentFacts:
    """What is known of each document of a file without reading its tokens.

    Attributes:
        hash_n: (n,) uint64, of the text where prepare_data left it, else of the token bytes.
        bytes_n: (n,) int64, bytes of text.
        tokens_n: (n,) int64, tokens without a trailing end-of-document token.
    """

    hash_n: np.ndarray
    bytes_n: np.ndarray
    tokens_n: np.ndarray


def document_facts(indexed: IndexedDataset, tokenizer: Tokenizer, cache_root: Path) -> DocumentFacts:
    """Facts of every document, from the side files or, for files made elsewhere, by one cached pass over the tokens.

    Raises:
        UserError: the file was made with another tokenizer, holds ids that the tokenizer does not have, or its side
            files belong to another file.
    """
    side_npz, side_json = Path(f"{indexed.prefix}.documents.npz"), Path(f"{indexed.prefix}.megamoe.json")
    lengths_n = np.diff(indexed.document_begin_n)
    if side_npz.is_file() and side_json.is_file():
        made_with = json.loads(side_json.read_text())["tokenizer"]
        if made_with != tokenizer.fingerprint:
            raise UserError(f"{indexed.prefix} was made with tokenizer {made_with[:12]} and data.tokenizer is {tokenizer.fingerprint[:12]}; use data.tokenizer=auto")
        with np.load(side_npz) as side:
            hash_n, bytes_n = side["hash"], side["bytes"]
        if len(hash_n) != indexed.num_documents:
            raise UserError(f"{side_npz} describes {len(hash_n)} documents and {indexed.prefix}.idx {indexed.num_documents}; prepare the pair again")
        return DocumentFacts(hash_n, bytes_n, lengths_n - 1)

    def build(folder: Path) -> None:
        log.info("reading %s once: document hashes and sizes of %d documents", indexed.prefix, indexed.num_documents)
        facts = _scan(indexed, tokenizer)
        np.savez(folder / "facts.npz", hash=facts.hash_n, bytes=facts.bytes_n, tokens=facts.tokens_n)

    key = {"corpus": indexed.fingerprint(), "tokenizer": tokenizer.fingerprint}
    with np.load(cached_folder(cache_root, "documents", key, build) / "facts.npz") as facts:
        return DocumentFacts(facts["hash"], facts["bytes"], facts["tokens"])


def _scan(indexed: IndexedDataset, tokenizer: Tokenizer) -> DocumentFacts:
    bytes_V = tokenizer.bytes_per_token_V()
    n = indexed.num_documents
    hash_n, bytes_n, tokens_n = np.zeros(n, np.uint64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for i in range(n):
        tokens = indexed.document(i)
        if len(tokens) and tokens[-1] == tokenizer.eod_id:
            tokens = tokens[:-1]
        if len(tokens):
            check_ids(tokens, tokenizer, indexed.prefix)
            bytes_n[i] = bytes_V[tokens].sum(dtype=np.int64)
        hash_n[i] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens))
        tokens_n[i] = len(tokens)
    return DocumentFacts(hash_n, bytes_n, tokens_n)


def check_ids(tokens: np.ndarray, tokenizer: Tokenizer, prefix: str) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"{prefix}.bin holds token id {bad} and data.tokenizer has ids 0 to {tokenizer.vocab_size - 1}; name the tokenizer it was made with")


class Documents:
    """Some documents of one file, presented with an end-of-document token on either side.

    Args:
        indexed: the file.
        facts: of all its documents.
        ids_n: (n,) which documents of the file these are, ascending.
        eod_id: the end-of-document token.
    """

    def __init__(self, indexed: IndexedDataset, facts: DocumentFacts, ids_n: np.ndarray, eod_id: int):
        self.indexed = indexed
        self.eod_id = eod_id
        self.tokens_n = facts.tokens_n[ids_n]
        self.hash_n = facts.hash_n[ids_n]
        self.num_bytes = int(facts.bytes_n[ids_n].sum())
        self._begin_n = indexed.document_begin_n[ids_n]
        self._targets = open_targets(indexed)

    def __len__(self) -> int:
        return len(self.tokens_n)

    @property
    def has_targets(self) -> bool:
        """Whether only some tokens are targets, as in conversations."""
        return self._targets is not None

    @property
    def pairs_n(self) -> np.ndarray:
        """(n,) int64, (input, label) pairs per document: its tokens and the end of document; 0 for an empty one."""
        return np.where(self.tokens_n > 0, self.tokens_n + 1, 0)

    def tokens(self, document: int) -> np.ndarray:
        """Tokens of a document without end-of-document tokens, a view into the mapped file."""
        begin = self._begin_n[document]
        return self.indexed.tokens[begin : begin + self.tokens_n[document]]

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """Presented tokens start … start+length (that is length+1 of them, hence `length` pairs), int64, a copy."""
        presented = np.full(length + 1, self.eod_id, np.int64)
        # Token i is presented at place i+1; the places before and after them keep the end-of-document token.
        first = max(start - 1, 0)
        last = min(start + length, int(self.tokens_n[document]))
        begin = self._begin_n[document]
        at = first - (start - 1)
        presented[at : at + last - first] = self.indexed.tokens[begin + first : begin + last]
        return presented

    def counted(self, document: int, start: int, length: int) -> np.ndarray | None:
        """(length,) bool: which labels of `read`'s pairs are targets, the end of document never; None means all are."""
        if self._targets is None:
            return None
        # Label j is presented token start+j+1, which is token start+j of the document.
        counted = np.zeros(length, bool)
        last = min(start + length, int(self.tokens_n[document]))
        begin = self._begin_n[document]
        counted[: last - start] = self._targets[begin + start : begin + last]
        return counted
