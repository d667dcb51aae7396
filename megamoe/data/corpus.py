"""Where text comes from, and how it becomes a token file with the facts the split needs.

Beside PREFIX.bin and PREFIX.idx, which any Megatron reader takes, we keep
    PREFIX.documents.npz   hash (uint64, of the document's UTF-8 text) and bytes (int64), one entry per document
    PREFIX.megamoe.json    tokenizer fingerprint and counts
    PREFIX.targets         only where not every token is a target (conversations): a byte per token, 1 for a target
so that the held-out split follows the text, not the tokenizer: runs with different vocabularies hold out the same documents.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from megamoe.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megamoe.data.rows import Encoded, TextRows
from megamoe.data.tokenizer import Tokenizer
from megamoe.utils.errors import UserError

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Every .py file of the running interpreter's standard library, tests included, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_documents() -> tuple[list[str], int]:
    """The standard library as texts, one per file, exactly as on disk, and how many files were left out.

    Some test files are deliberately not UTF-8: those are left out. Reading all takes about 0.1 s and 31 MB, so the
    list is simply kept in memory while it is encoded.
    """
    texts, skipped = [], 0
    for path in stdlib_files():
        try:
            texts.append(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            skipped += 1
    if not any(texts):
        raise UserError(f"data.source=stdlib: no library sources under {sysconfig.get_path('stdlib')} (empty corpus); use data.source=text with data.paths")
    return texts, skipped


def text_hash(text: str | bytes) -> int:
    """64-bit hash of a document's text, uniform over [0, 2^64)."""
    return xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text)


def heldout_mask(hash_n: np.ndarray, fraction: float) -> np.ndarray:
    """(n,) bool: documents whose hash lies in the lowest `fraction` of its range. Equal texts fall on the same side."""
    return hash_n < np.uint64(int(fraction * 2**64))


def tokenizer_sample(texts: Iterable[str], total_bytes: int, target_bytes: int, holdout_fraction: float) -> Iterator[str]:
    """Documents to train a tokenizer on: about `target_bytes`, from the top of the hash range, so never held-out ones."""
    lowest = max(holdout_fraction, 1 - target_bytes / max(total_bytes, 1))
    return (text for text in texts if text_hash(text) >= int(lowest * 2**64))


def write_documents(
    texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, *, allow_empty: bool = False
) -> dict[str, int]:
    """`write_encoded` of plain texts; those of no text are left out, since there is nothing in them to predict."""
    return write_encoded(TextRows().encode(texts, tokenizer), tokenizer, prefix, allow_empty=allow_empty)


def write_encoded(documents: Iterable[Encoded], tokenizer: Tokenizer, prefix: Path, *, allow_empty: bool = False) -> dict[str, int]:
    """Write documents to PREFIX.bin/.idx and its side files, in order, each followed by the end-of-document token.

    Args:
        documents: what to write. Either all of them say which tokens count, or none does.
        tokenizer: gives the end of document and the dtype of the file.
        prefix: output path without suffix.
        allow_empty: write a pair of no documents instead of raising.

    Returns:
        {"documents": …, "tokens": … (with end of document), "bytes": …}

    Raises:
        UserError: no document (nothing is written then).
    """
    hashes, sizes, num_tokens = [], [], 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer, TargetsWriter(prefix) as targets:
        for document in documents:
            hashes.append(document.hash)
            sizes.append(document.num_bytes)
            num_tokens += len(document.ids) + 1
            writer.add_document(np.append(document.ids, np.int32(tokenizer.eod_id)))
            if document.counted is not None:
                targets.add(np.append(document.counted, False))
        if not sizes and not allow_empty:
            raise UserError("empty corpus: no document with text was found")
        counts = {"documents": len(sizes), "tokens": num_tokens, "bytes": sum(sizes)}
        write_side_files(prefix, np.array(hashes, np.uint64), np.array(sizes, np.int64), tokenizer, counts)
        targets.finish()
        writer.finish()
    return counts


class TargetsWriter:
    """Writes PREFIX.targets: one byte per token of PREFIX.bin, 1 where it is a target. No file where nothing is added."""

    def __init__(self, prefix: str | Path):
        self.path = targets_path(prefix)
        self._scratch = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        self._file = None

    def add(self, counted: np.ndarray) -> None:
        if self._file is None:
            self._file = open(self._scratch, "wb")
        self._file.write(counted.astype(np.uint8).tobytes())

    def finish(self) -> None:
        if self._file is None:
            # Left from what was at this prefix before.
            self.path.unlink(missing_ok=True)
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._scratch, self.path)

    def __enter__(self) -> TargetsWriter:
        return self

    def __exit__(self, *exc) -> None:
        if self._file is not None:
            self._file.close()
            self._scratch.unlink(missing_ok=True)


def targets_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.targets")


def open_targets(indexed: IndexedDataset) -> np.ndarray | None:
    """(total,) uint8, mapped: 1 where a token of the pair is a target; None where all are.

    Raises:
        UserError: the file belongs to another pair.
    """
    path = targets_path(indexed.prefix)
    if not path.is_file():
        return None
    if path.stat().st_size != indexed.num_tokens:
        raise UserError(f"{path} has {path.stat().st_size} bytes for {indexed.num_tokens} tokens of {indexed.prefix}.bin; prepare the pair again")
    return np.memmap(path, dtype=np.uint8, mode="r") if indexed.num_tokens else np.empty(0, np.uint8)


def write_side_files(prefix: Path, hash_n: np.ndarray, bytes_n: np.ndarray, tokenizer: Tokenizer, facts: dict) -> None:
    """Write PREFIX.documents.npz and PREFIX.megamoe.json, each at once or not at all."""
    facts = {"tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id, **facts}
    with replacing(Path(f"{prefix}.documents.npz")) as scratch, open(scratch, "wb") as f:
        np.savez(f, hash=hash_n, bytes=bytes_n)
    with replacing(Path(f"{prefix}.megamoe.json")) as scratch:
        scratch.write_text(json.dumps(facts, indent=1, sort_keys=True))


class replacing:
    """`with replacing(path) as scratch:` gives a scratch path that takes the name `path` if the block succeeds."""

    def __init__(self, path: Path):
        self.path = path
        self.scratch = path.with_name(f"{path.name}.tmp-{os.getpid()}")

    def __enter__(self) -> Path:
        return self.scratch

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            os.replace(self.scratch, self.path)
        else:
            self.scratch.unlink(missing_ok=True)

