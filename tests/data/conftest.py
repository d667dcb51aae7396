"""A small tokenizer and token files from real text, shared by the data tests."""

from __future__ import annotations

import os

# Before any tokenizer starts its thread pool: the suite shares few cores.
os.environ.setdefault("RAYON_NUM_THREADS", "1")

import pytest

from megamoe.data.corpus import stdlib_files, write_documents
from megamoe.data.tokenizer import load_tokenizer, train_tokenizer

_FILES = ("this.py", "textwrap.py", "heapq.py", "keyword.py", "bisect.py", "sched.py", "stat.py", "cmd.py", "queue.py", "shlex.py", "glob.py", "copy.py")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """A dozen real documents from 0.8 to 23 KB, one of a few bytes, and one with characters of 2, 3 and 4 bytes."""
    paths = {path.name: path for path in stdlib_files() if path.name in _FILES and path.parent.name.startswith("python")}
    return [*(paths[name].read_text() for name in _FILES), "x\n", "naïve 数据 🙂 " * 40]


@pytest.fixture(scope="session")
def tokenizer_file(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(texts, 512, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file):
    return load_tokenizer(tokenizer_file)


@pytest.fixture(scope="session")
def corpus(texts, tokenizer, tmp_path_factory):
    """Prefix of a token file of all texts, with side files and tokenizer, as tools/prepare_data.py leaves them."""
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    write_documents(texts, tokenizer, prefix)
    tokenizer.save(prefix)
    return prefix
