"""Megatron's .bin/.idx pair, read and written natively: existing corpora are used as they are, and ours anywhere.

A .bin is all tokens, little-endian, nothing else. Its .idx is, all little-endian:

    9 bytes   magic MMIDIDX\\0\\0
    u64       version, 1
    u8        dtype code: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    u64       number of sequences S
    u64       number of document marks M
    i32 × S   tokens of each sequence
    i64 × S   byte offset of each sequence in the .bin
    i64 × M   first sequence of each document, then S
    i8  × S   modes, in multimodal files only

Twin (tests only): megatron.core.datasets.indexed_dataset of megatron-core 0.16.1.
"""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

import numpy as np
import xxhash

from megamoe.utils.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
# Megatron's own border, not 65536: the same vocabulary must get the same dtype from both writers.
_UINT16_VOCAB_LIMIT = 65500


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below a vocabulary of 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCAB_LIMIT else np.int32)


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """A mapped .bin/.idx pair. Reading a document copies nothing.

    Attributes:
        prefix: path without .bin / .idx.
        dtype: of the stored tokens.
        tokens: all tokens, (total,) of `dtype`, mapped read-only.
        document_begin_n: (n+1,) int64, first token of each document in `tokens`, then the end of the last.

    Raises:
        UserError: a file is missing, is not a Megatron index, is of another version, or contradicts its partner.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        idx, bin_ = idx_path(self.prefix), bin_path(self.prefix)
        for path in (idx, bin_):
            if not path.is_file():
                raise UserError(f"data path {path} does not exist; data.paths takes prefixes, `corpus` for corpus.bin and corpus.idx")
        header = _read_header(idx)
        _, _, code, num_sequences, num_marks = header
        self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        lengths_at = _HEADER.size
        offsets_at = lengths_at + 4 * num_sequences
        marks_at = offsets_at + 8 * num_sequences
        end = marks_at + 8 * num_marks
        size = idx.stat().st_size
        if size not in (end, end + num_sequences):
            raise UserError(f"{idx} has {size} bytes where its header asks for {end}: the file is truncated or damaged; copy or prepare it again")
        mapped = np.memmap(idx, mode="r")
        lengths = mapped[lengths_at:offsets_at].view("<i4")
        offsets = mapped[offsets_at:marks_at].view("<i8")
        marks = mapped[marks_at:end].view("<i8")

        itemsize = self.dtype.itemsize
        sequence_begin = np.zeros(num_sequences + 1, np.int64)
        np.cumsum(lengths, out=sequence_begin[1:])
        bin_bytes, expected_bytes = bin_.stat().st_size, int(sequence_begin[-1]) * itemsize
        if bin_bytes != expected_bytes:
            what = "is truncated" if bin_bytes < expected_bytes else "does not belong to its .idx"
            raise UserError(f"{bin_} {what}: it has {bin_bytes} bytes where {idx.name} lists {expected_bytes}; copy or prepare it again")
        if (num_sequences and int(lengths.min()) < 0) or not np.array_equal(offsets, sequence_begin[:-1] * itemsize):
            raise UserError(f"{idx} lists sequences that do not follow each other in {bin_.name}; write the pair again with tools/prepare_data.py")
        if not num_marks or marks[0] != 0 or marks[-1] != num_sequences or np.any(np.diff(marks) < 0):
            raise UserError(f"{idx} has document marks that do not run from 0 to its {num_sequences} sequences; write the pair again")
        self.document_begin_n = sequence_begin[marks]
        # An empty file cannot be mapped.
        self.tokens = np.memmap(bin_, dtype=self.dtype, mode="r") if bin_bytes else np.empty(0, self.dtype)

    @property
    def num_documents(self) -> int:
        return len(self.document_begin_n) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, a read-only view into the mapped file."""
        begin, end = self.document_begin_n[index : index + 2]
        return self.tokens[begin:end]

    def fingerprint(self) -> str:
        """Hash of the index and of both ends of the .bin: tells corpora apart without reading them through."""
        h = xxhash.xxh3_128(idx_path(self.prefix).read_bytes())
        h.update(np.ascontiguousarray(self.tokens[: 1 << 18]).tobytes())
        h.update(np.ascontiguousarray(self.tokens[-(1 << 18) :]).tobytes())
        return h.hexdigest()


def _read_header(idx: Path) -> tuple[bytes, int, int, int, int]:
    with open(idx, "rb") as f:
        raw = f.read(_HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise UserError(f"{idx} starts with {raw[:9]!r}, not with {MAGIC!r}: it is not a Megatron index; name the prefix of a .bin/.idx pair")
    if len(raw) < _HEADER.size:
        raise UserError(f"{idx} ends inside its header: the file is truncated; copy or prepare it again")
    header = _HEADER.unpack(raw)
    _, version, code, _, _ = header
    if version != VERSION:
        raise UserError(f"{idx} has index version {version}; only version {VERSION} can be read")
    if code not in _DTYPES or not np.issubdtype(_DTYPES[code], np.integer):
        raise UserError(f"{idx} has dtype code {code}, which is no integer type; token files use 8 (uint16) or 4 (int32)")
    return header


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx; both appear only in `finish`, whole, the .idx last.

    A reader that finds an .idx therefore finds a complete pair. Leaving the `with` block by an exception, or without
    `finish`, removes everything written.

    Args:
        prefix: output path without suffix; its folder must exist.
        dtype: token type, `token_dtype(vocab_size)` for files that Megatron should read.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _CODES[np.dtype(dtype)]
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self._tmp_bin = Path(f"{self.prefix}.bin.tmp-{os.getpid()}")
        self._tmp_idx = Path(f"{self.prefix}.idx.tmp-{os.getpid()}")
        self._file = open(self._tmp_bin, "wb")

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document of one sequence. The caller has checked that the ids fit the dtype."""
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).tobytes())
        self._lengths.append(len(tokens))
        self._document_ends.append(len(self._lengths))

    def add_pair(self, other: IndexedDataset) -> None:
        """Append every document of another pair of the same dtype, one sequence each."""
        if other.dtype != self.dtype:
            raise UserError(f"{other.prefix} holds {other.dtype} tokens and cannot be joined to {self.prefix} with {self.dtype}")
        with open(bin_path(other.prefix), "rb") as source:
            while chunk := source.read(1 << 24):
                self._file.write(chunk)
        first = len(self._lengths)
        self._lengths.extend(np.diff(other.document_begin_n).tolist())
        self._document_ends.extend(range(first + 1, len(self._lengths) + 1))

    def finish(self) -> None:
        """Write the index and give both files their names."""
        _sync_and_close(self._file)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        with open(self._tmp_idx, "wb") as f:
            f.write(_HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._document_ends)))
            f.write(lengths.astype("<i4").tobytes())
            f.write(offsets.astype("<i8").tobytes())
            f.write(np.frombuffer(self._document_ends, np.int64).astype("<i8").tobytes())
            _sync_and_close(f)
        # An old index must not describe the new .bin, not even for a moment.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._tmp_bin, bin_path(self.prefix))
        os.replace(self._tmp_idx, idx_path(self.prefix))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *exc) -> None:
        self._file.close()
        self._tmp_bin.unlink(missing_ok=True)
        self._tmp_idx.unlink(missing_ok=True)


def _sync_and_close(file) -> None:
    """Without fsync a power cut can leave a named file with no content."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
