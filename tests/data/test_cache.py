"""All ranks of a host ask for the same derived files at the same moment, and any of them may be killed.

Not covered: file systems without locks, where each process builds and the first rename wins.
"""

import signal
import subprocess
import sys
import time

import pytest

from megamoe.data.cache import cached_folder

# Appends to builds.txt, then takes a while, as a real build does.
BUILD = """
import sys, time, pathlib
from megamoe.data.cache import cached_folder
root = pathlib.Path(sys.argv[1])
def build(folder):
    with open(root / "builds.txt", "a") as f: f.write("x")
    (folder / "half").write_text("half")
    time.sleep(float(sys.argv[2]))
    (folder / "content").write_text("whole")
print((cached_folder(root, "kind", {"a": 1}, build) / "content").read_text())
"""


def start(root, seconds):
    return subprocess.Popen([sys.executable, "-c", BUILD, str(root), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_build_once_and_agree(tmp_path):
    processes = [start(tmp_path, 0.5) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["whole\n"] * 4
    assert (tmp_path / "builds.txt").read_text() == "x"


def test_a_killed_build_frees_the_lock_leaves_nothing_finished_and_is_swept(tmp_path):
    first = start(tmp_path, 60)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("kind/*.tmp-*/half")) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert list(tmp_path.glob("kind/*.tmp-*")) and not list(tmp_path.glob("kind/*/content"))
    assert start(tmp_path, 0).communicate(timeout=30)[0] == "whole\n"
    assert not list(tmp_path.glob("kind/*.tmp-*"))


def test_a_failed_build_leaves_nothing_and_its_error_passes(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise ValueError("empty corpus")

    with pytest.raises(ValueError, match="empty corpus"):
        cached_folder(tmp_path, "kind", {}, build)
    assert [path.suffix for path in (tmp_path / "kind").iterdir()] == [".lock"]


def test_every_fact_of_the_key_counts_and_its_order_does_not(tmp_path):
    names = {cached_folder(tmp_path, "kind", key, lambda _: None).name for key in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3})}
    assert len(names) == 2


# Under a limit on file size the kernel refuses writes as on a full disk, in every writer's own way of writing.
WRITE_UNDER_LIMIT = """
import pathlib, resource, sys
import numpy as np
from megamoe.data.cache import cached_folder
from megamoe.data.corpus import write_documents
from megamoe.data.packing import pack_concat
from megamoe.data.tokenizer import load_tokenizer, train_tokenizer
root, writer = pathlib.Path(sys.argv[1]), sys.argv[2]
index, text = pack_concat(np.full(5000, 7), 64, seed=0), pathlib.Path(np.__file__).read_text()
train_tokenizer([text], 600, root / "tokenizer.json")
tokenizer = load_tokenizer(root / "tokenizer.json")
build = {
    "packing": index.save,
    "tokenizer": lambda folder: train_tokenizer([text], 600, folder / "tokenizer.json"),
    "corpus": lambda folder: write_documents([text] * 50, tokenizer, folder / "corpus"),
}[writer]
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    cached_folder(root, "kind", {}, build)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("writer", ["packing", "tokenizer", "corpus"])
def test_a_full_disk_is_one_line_with_the_way_out(tmp_path, writer):
    ran = subprocess.run([sys.executable, "-c", WRITE_UNDER_LIMIT, str(tmp_path), writer], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n") == 1
    for word in (f"data.cache_dir={tmp_path}", "File too large", "MEGAMOE_CACHE"):
        assert word in ran.stdout
    assert [path.suffix for path in (tmp_path / "kind").iterdir()] == [".lock"]
