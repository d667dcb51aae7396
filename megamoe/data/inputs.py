"""The user's files as documents: text files, .jsonl (plain, gzip, zstd) and Parquet, cut into jobs of bounded size.

A job is a pure function of the files' names, sizes and times, so a second run plans the same jobs as the first.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megamoe.utils.errors import UserError

log = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, *PARQUET_SUFFIXES)


@dataclass(frozen=True)
class Piece:
    """A part of one input file.

    Attributes:
        path: absolute path.
        size, mtime_ns: of the whole file when it was planned.
        begin, end: bytes of a text or plain .jsonl file, row groups of a Parquet file, (0, size) of a compressed one.
    """

    path: str
    size: int
    mtime_ns: int
    begin: int
    end: int


def find_inputs(paths: Iterable[str | Path]) -> list[Path]:
    """Files named or found under the folders named, in the order named and sorted inside a folder.

    Raises:
        UserError: a path does not exist, a named file is of no known kind, or nothing is found.
    """
    files: list[Path] = []
    for path in (Path(p).expanduser() for p in paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            known = [p for p in inside if p.name.endswith(SUFFIXES)]
            if len(known) < len(inside):
                log.warning("left out %d of %d files under %s that are not %s", len(inside) - len(known), len(inside), path, " ".join(SUFFIXES))
            if not known:
                raise UserError(f"{path} holds no input (empty corpus): expected files ending in {' '.join(SUFFIXES)}")
            files.extend(known)
        elif not path.exists():
            raise UserError(f"{path} does not exist; name a file or a folder")
        elif not path.name.endswith(SUFFIXES):
            raise UserError(f"{path} is of no known kind; expected a name ending in {' '.join(SUFFIXES)}")
        else:
            files.append(path)
    return [file.resolve() for file in files]


def plan_jobs(files: Iterable[Path], job_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut files into jobs of about `job_bytes`, in order: large ones are split where their form allows, small ones joined."""
    jobs: list[tuple[Piece, ...]] = []
    open_job: list[Piece] = []
    open_bytes = 0
    for file in files:
        for piece, weight in _pieces(file, job_bytes):
            if open_job and open_bytes + weight > job_bytes:
                jobs.append(tuple(open_job))
                open_job, open_bytes = [], 0
            open_job.append(piece)
            open_bytes += weight
    if open_job:
        jobs.append(tuple(open_job))
    return jobs


def _pieces(file: Path, job_bytes: int) -> Iterator[tuple[Piece, int]]:
    """(piece, about how many bytes it reads)"""
    stat = file.stat()
    size, facts = stat.st_size, (str(file), stat.st_size, stat.st_mtime_ns)
    if file.name.endswith(PARQUET_SUFFIXES):
        groups = _open_parquet(str(file)).num_row_groups
        for group in range(groups):
            yield Piece(*facts, group, group + 1), size // max(groups, 1)
    elif file.name.endswith(".jsonl"):
        for begin in range(0, size, job_bytes):
            end = min(size, begin + job_bytes)
            yield Piece(*facts, begin, end), end - begin
    else:
        yield Piece(*facts, 0, size), size


def read_documents(piece: Piece, text_key: str) -> Iterator[str]:
    """Texts of a piece, in file order. A .jsonl line belongs to the piece in which it begins.

    Raises:
        UserError: not UTF-8, not JSON, no such field, damaged or truncated compression, changed since it was planned.
    """
    with _readable(piece):
        if piece.path.endswith(PARQUET_SUFFIXES):
            yield from _read_parquet(piece, text_key)
        elif piece.path.endswith(JSONL_SUFFIXES):
            for number, line in _read_lines(piece):
                text = _text_of_line(piece.path, number, line, text_key)
                if text:
                    yield text
        else:
            yield _decode(Path(piece.path).read_bytes(), piece.path, 0)


def read_objects(piece: Piece, keys: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    """(where it stands, object) of every row of a .jsonl or Parquet piece, in file order. Null fields are left out.

    Args:
        piece: as for `read_documents`.
        keys: columns to read of a Parquet file, where it has them; the first one must be there.

    Raises:
        UserError: as `read_documents`, and for a file of plain text.
    """
    with _readable(piece):
        if piece.path.endswith(PARQUET_SUFFIXES):
            file = _open_parquet(piece.path)
            columns = [key for key in keys if key in file.schema_arrow.names]
            if keys[0] not in columns:
                raise UserError(f"{piece.path} has no column {keys[0]!r} (it has: {', '.join(file.schema_arrow.names[:8])})")
            for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=range(piece.begin, piece.end)):
                for row in batch.to_pylist():
                    yield f"{piece.path} row group {piece.begin}", _without_nulls(row)
        elif piece.path.endswith(JSONL_SUFFIXES):
            for at, line in _read_lines(piece):
                row = _object_of_line(piece.path, at, line)
                if row is not None:
                    yield f"{piece.path} line at byte {at}", _without_nulls(row)
        else:
            raise UserError(f"{piece.path} is plain text; conversations are read from {' '.join((*JSONL_SUFFIXES, *PARQUET_SUFFIXES))}")


@contextmanager
def _readable(piece: Piece):
    """Refuse a file that changed since it was planned, and say in one line what is wrong with one that cannot be read."""
    try:
        stat = os.stat(piece.path)
        if (stat.st_size, stat.st_mtime_ns) != (piece.size, piece.mtime_ns):
            raise UserError(f"{piece.path} changed while it was being read; start again when it is complete")
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{piece.path} is damaged or truncated: {error}; copy it again") from error
    except OSError as error:
        raise UserError(f"{piece.path} cannot be read: {error.strerror or error}") from error


def _without_nulls(value):
    """Parquet gives every struct all fields of its column's type; a missing one must not look like a null one."""
    if isinstance(value, dict):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(byte position in the uncompressed file, line)"""
    if piece.path.endswith(".gz"):
        with gzip.open(piece.path, "rb") as f:
            yield from _number_lines(f)
    elif piece.path.endswith(".zst"):
        with open(piece.path, "rb") as f:
            yield from _zstd_lines(f, piece.path)
    else:
        with open(piece.path, "rb") as f:
            if piece.begin:
                # The line that holds the byte before `begin` belongs to the piece before, whole.
                f.seek(piece.begin - 1)
                f.readline()
            while (at := f.tell()) < piece.end:
                yield at, f.readline()


def _number_lines(f: BinaryIO) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in f:
        yield at, line
        at += len(line)


def _zstd_lines(f: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    # The library's stream reader takes a file that ends inside a frame for a complete one, so frames are followed here.
    import zstandard

    at, rest = 0, b""
    frame = None
    while raw := f.read(1 << 20):
        while raw:
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                rest += frame.decompress(raw)
            except zstandard.ZstdError as error:
                raise UserError(f"{path} is damaged: {error}; copy it again") from error
            raw = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield at, line
            at += len(line) + 1
    if frame is not None:
        raise UserError(f"{path} is damaged or truncated: it ends inside a zstd frame; copy it again")
    if rest:
        yield at, rest


def _text_of_line(path: str, at: int, line: bytes, text_key: str) -> str | None:
    row = _object_of_line(path, at, line)
    if row is None:
        return None
    if text_key not in row:
        raise UserError(f"{path} has no field {text_key!r} in the line at byte {at} (it has: {', '.join(list(row)[:6])}); name the right one as text key")
    return _checked(row[text_key], path, f"line at byte {at}", text_key)


def _object_of_line(path: str, at: int, line: bytes) -> dict | None:
    line = line.strip()
    if not line:
        return None
    decoded = _decode(line, path, at)
    try:
        row = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} has a line at byte {at} that is not JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path} has a line at byte {at} that is no JSON object but a {type(row).__name__}")
    return row


def _checked(text: object, path: str, where: str, text_key: str) -> str | None:
    if text is not None and not isinstance(text, str):
        raise UserError(f"{path} has a field {text_key!r} of type {type(text).__name__} in the {where}; text is needed")
    try:
        if text:
            text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise UserError(f"{path} has text in the {where} that is not valid Unicode: {error.reason}") from error
    return text


def _decode(raw: bytes, path: str, at: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at {at + error.start}; convert it first, for instance `iconv -f latin1 -t utf-8`"
        ) from error


def _open_parquet(path: str):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is no Parquet file, or a truncated one: {str(error).splitlines()[0]}") from error


def _read_parquet(piece: Piece, text_key: str) -> Iterator[str]:
    file = _open_parquet(piece.path)
    if text_key not in file.schema_arrow.names:
        raise UserError(f"{piece.path} has no column {text_key!r} (it has: {', '.join(file.schema_arrow.names[:8])}); name the right one as text key")
    for batch in file.iter_batches(batch_size=1024, columns=[text_key], row_groups=range(piece.begin, piece.end)):
        try:
            texts = batch.column(0).to_pylist()
        except UnicodeDecodeError as error:
            raise UserError(f"{piece.path} is not UTF-8 in row group {piece.begin}: {error.reason}") from error
        for text in texts:
            if _checked(text, piece.path, f"row group {piece.begin}", text_key):
                yield text
