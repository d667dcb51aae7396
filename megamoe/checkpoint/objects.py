"""One interface to where checkpoints lie: a local folder or an `s3://bucket/prefix`, both through obstore.

Paths are relative to the place and use `/`. Nothing is ever overwritten: `put` refuses a name that is taken, which is what
makes a commit atomic. Credentials and endpoint of S3 come from the usual AWS_* variables (AWS_ENDPOINT and
AWS_ALLOW_HTTP=true for a server of one's own).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, S3Store

from megamoe.utils.errors import check


class StoreError(RuntimeError):
    """The place cannot be reached, read or written: full, down, forbidden. One line."""


class Taken(StoreError):
    """`put` to a name that exists."""


class Objects:
    """Small and large byte strings by name. Safe to use from several threads.

    Args:
        location: a local path, `file://…`, or `s3://bucket/prefix`.
        create: make a local folder that is not there, at once; `put` does in any case.
    """

    def __init__(self, location: str | Path, *, create: bool = False):
        text = str(location)
        scheme, separator, rest = text.partition("://")
        check(not separator or scheme in ("s3", "file"), "checkpoint location", text, "is neither a local path nor s3://bucket/prefix")
        self.location, self.root = text.rstrip("/"), None
        if scheme == "s3" and separator:
            bucket, _, prefix = rest.strip("/").partition("/")
            check(bool(bucket), "checkpoint location", text, "names no bucket: write s3://bucket/prefix")
            # Waiting longer than this for one object would hide an outage from the run's log.
            retry = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
            # A file of a slow line takes longer than the client's half minute.
            client = {"timeout": timedelta(seconds=300), "connect_timeout": timedelta(seconds=10), "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")}
            self._store = S3Store(bucket, prefix=prefix or None, retry_config=retry, client_options=client, region=os.environ.get("AWS_REGION", "us-east-1"))
            return
        self.root = Path(rest if separator else text).absolute()
        self._store = None
        if create:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"{self.location}: {_line(error)}") from None

    def put(self, name: str, data: bytes) -> None:
        """Write a new object; durable when this returns.

        Raises:
            Taken: the name exists. StoreError: it could not be written; nothing is visible under the name.
        """
        try:
            if self.root is not None:
                _create(self.root / name, data)
            else:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, FileExistsError):
            raise Taken(f"{self.location}/{name} already exists") from None
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}/{name}: {_line(error)}") from None

    def get(self, name: str) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: there is none. StoreError: any other trouble.
        """
        try:
            return bytes(obstore.get(self._need(), name).bytes())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.location}/{name}") from None
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}/{name}: {_line(error)}") from None

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`. Raises as `get`; a short object is a StoreError."""
        if length == 0:
            return b""
        try:
            data = bytes(obstore.get_range(self._need(), name, start=start, length=length))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.location}/{name}") from None
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}/{name}: {_line(error)}") from None
        if len(data) != length:
            raise StoreError(f"{self.location}/{name}: ends before byte {start + length}")
        return data

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Names of all objects under a folder -> bytes. Empty when there is no such folder."""
        try:
            return {m["path"]: m["size"] for batch in obstore.list(self._need(), folder or None) for m in batch}
        except FileNotFoundError:
            return {}
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}/{folder}: {_line(error)}") from None

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly under the place, or under one of its folders, sorted."""
        try:
            if self.root is not None:
                here = self.root / folder
                return sorted(p.name for p in here.iterdir() if p.is_dir()) if here.is_dir() else []
            return sorted(p.strip("/").rpartition("/")[2] for p in obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"])
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}: {_line(error)}") from None

    def delete(self, names: list[str]) -> None:
        """Delete objects; those that are gone already are fine."""
        try:
            if self.root is not None:
                for name in names:
                    (self.root / name).unlink(missing_ok=True)
            elif names:
                obstore.delete(self._store, names)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise StoreError(f"{self.location}: {_line(error)}") from None

    def delete_folder(self, folder: str) -> None:
        """Delete all below a folder. Locally also what a writer that died left half-written, which no listing shows."""
        if self.root is not None:
            shutil.rmtree(self.root / folder, ignore_errors=True)
        else:
            self.delete(list(self.sizes(folder)))

    def same_place(self, other: Objects) -> bool:
        """Whether both name one place, however it is spelt."""
        if self.root is None or other.root is None:
            return self.location == other.location
        return os.path.realpath(self.root) == os.path.realpath(other.root)

    def delete_empty(self, folder: str) -> None:
        """Remove a local folder that holds no object; drafts that writers which died left in it go along."""
        if self.root is None:
            return
        here = self.root / folder
        with contextlib.suppress(OSError):
            entries = list(here.iterdir())
            if all(p.name.startswith(".") and p.is_file() for p in entries):
                for draft in entries:
                    draft.unlink()
                here.rmdir()

    def _need(self):
        # A local folder may be made after this object.
        if self._store is None:
            if not self.root.is_dir():
                raise FileNotFoundError(self.location)
            self._store = LocalStore(self.root)
        return self._store


def _create(path: Path, data: bytes) -> None:
    """Give a file its name only when all of it is on the disk: a name that is seen after a power cut has its bytes.

    Raises:
        FileExistsError: the name is taken. OSError: anything else; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(error: Exception) -> str:
    """obstore's errors carry a debug dump below an empty line; an OSError's own text repeats the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).split("\n\nDebug source")[0]
    return " ".join(text.split())[:300]
