"""Derived files are built once, under a name that is the hash of everything they depend on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import xxhash

from megamoe.utils.errors import UserError


def cached_folder(root: Path, kind: str, key: dict, build: Callable[[Path], None]) -> Path:
    """Return root/kind/<hash of key>, built first if it is not there.

    The folder appears by one rename when `build` has returned, so a crash leaves nothing that looks finished, and what
    a killed build left behind is removed by the next. Processes of one host that want the same folder wait for the one
    that builds it (a file lock, freed by the kernel when its holder dies).

    Args:
        root: the cache folder, created when missing.
        kind: sub-folder, for the reader of the cache.
        key: JSON-able facts, all that the content depends on. Saved beside it as key.json.
        build: fills the empty folder it is given.

    Raises:
        UserError: the cache cannot be written (read-only, full); and whatever `build` raises.
    """
    text = json.dumps(key, sort_keys=True)
    final = root / kind / xxhash.xxh3_128_hexdigest(text.encode())
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_suffix(".lock")) as sole:
            if final.is_dir():
                return final
            if sole:
                for left_over in final.parent.glob(f"{final.name}.tmp-*"):
                    shutil.rmtree(left_over)
            scratch = final.parent / f"{final.name}.tmp-{os.getpid()}"
            scratch.mkdir()
            try:
                build(scratch)
                (scratch / "key.json").write_text(text)
                os.rename(scratch, final)
            except OSError as error:
                # Without locks two builders can meet here; what both built is the same.
                if not final.is_dir():
                    raise error
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"data.cache_dir={root} cannot be written ({error.strerror}); set data.cache_dir or MEGAMOE_CACHE to another folder"
            ) from error
        raise
    return final


@contextmanager
def _locked(path: Path):
    """Hold an exclusive lock; yields False where the file system has none."""
    with open(path, "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            yield False
            return
        yield True
