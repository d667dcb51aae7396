"""What a row of the input is: a text, or a conversation. How it is read and encoded.

`TextRows` and `ChatRows` have the same methods, and go to worker processes as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from megamoe.data.chat import BadConversation, encode
from megamoe.data.inputs import Piece, read_documents, read_objects
from megamoe.data.tokenizer import Tokenizer
from megamoe.utils.errors import UserError

# Enough text per call that the tokenizer's threads stay busy, little enough that ids of one batch stay small in memory.
_BATCH_CHARACTERS = 4 << 20

CONVERSATION_KEYS = ("messages", "tools", "thinking_effort", "tool_choice", "response_format")


@dataclass(frozen=True)
class Encoded:
    """One document.

    Attributes:
        ids: (n,) int32 tokens, end of document not among them.
        hash: 64 bits of the row's content, uniform: decides on which side of the held-out split it falls.
        num_bytes: bytes of the content.
        counted: (n,) bool, which tokens are targets; None means all.
    """

    ids: np.ndarray
    hash: int
    num_bytes: int
    counted: np.ndarray | None = None


@dataclass(frozen=True)
class TextRows:
    """Plain text: whole text files, or the field `key` of .jsonl and Parquet rows."""

    key: str = "text"

    def facts(self) -> list:
        """What encoded documents depend on, for cache keys."""
        return ["text", self.key]

    def read(self, piece: Piece) -> Iterator[str]:
        """Rows of a piece that have text. Raises what `read_documents` does."""
        return (text for text in read_documents(piece, self.key) if text)

    def text(self, row: str) -> str:
        """Text to train a tokenizer on."""
        return row

    def encode(self, rows: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Documents in order; rows without text are left out."""
        for batch in _batches((row for row in rows if row), len):
            for text, ids in zip(batch, tokenizer.encode_batch(batch)):
                raw = text.encode()
                yield Encoded(ids, xxhash.xxh3_64_intdigest(raw), len(raw))


@dataclass(frozen=True)
class ChatRows:
    """Conversations in OpenAI's form, one object per .jsonl or Parquet row; see `data/chat.py`.

    A row is (where it stands, the object). Conversations without a target are left out: there is nothing in them to learn.
    """

    thinking: bool = True

    def facts(self) -> list:
        return ["chat", self.thinking, 1]

    def read(self, piece: Piece) -> Iterator[tuple[str, dict]]:
        return read_objects(piece, CONVERSATION_KEYS)

    def text(self, row: tuple[str, dict]) -> str:
        messages = row[1].get("messages")
        contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        return "\n".join(content for content in contents if isinstance(content, str))

    def encode(self, rows: Iterable[tuple[str, dict]], tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Documents in order.

        Raises:
            UserError: a conversation that the template cannot write, with its place.
        """
        for batch in _batches(rows, lambda row: len(self.text(row)) + 1):
            for (_, conversation), (ids, counted) in zip(batch, self._encoded(batch, tokenizer)):
                if counted.any():
                    raw = json.dumps({key: conversation[key] for key in CONVERSATION_KEYS if key in conversation}, sort_keys=True, ensure_ascii=False).encode()
                    yield Encoded(ids, xxhash.xxh3_64_intdigest(raw), len(raw), counted)

    def _encoded(self, batch: list[tuple[str, dict]], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
        try:
            return encode([conversation for _, conversation in batch], tokenizer, thinking=self.thinking)
        except BadConversation:
            # Find the one it was, for its place.
            for where, conversation in batch:
                try:
                    encode([conversation], tokenizer, thinking=self.thinking)
                except BadConversation as error:
                    raise UserError(f"{where}: {error}") from error
            raise


Rows = TextRows | ChatRows


def _batches(rows: Iterable, size_of) -> Iterator[list]:
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
