"""Preparing a corpus takes days at size: it must survive being killed, use all cores, and still be exact to the byte.

Not covered: several hosts on one output (a lock refuses a second writer on file systems that have locks).
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megamoe.data.indexed import IndexedDataset
from megamoe.data.inputs import find_inputs, plan_jobs, read_documents

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"


def run(*args, **kwargs):
    return subprocess.run([sys.executable, str(TOOL), *map(str, args)], capture_output=True, text=True, timeout=120, **kwargs)


def read(prefix, tokenizer):
    data = IndexedDataset(prefix)
    documents = [data.document(i) for i in range(data.num_documents)]
    assert all(d[-1] == tokenizer.eod_id for d in documents), "each document ends, as Megatron expects"
    return [tokenizer.decode(d[:-1]) for d in documents]


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": i, key: t}, ensure_ascii=bool(i % 2)) + "\n" for i, t in enumerate(texts)).encode()


@pytest.fixture
def inputs(tmp_path, texts):
    """The same texts in every form."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = jsonl(texts)
    half = len(lines) // 2
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    # Two frames, cut in the middle of a line.
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines[:half]) + zstandard.compress(lines[half:]))
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), folder / "d.parquet", row_group_size=3)
    for i, text in enumerate(texts):
        (folder / f"e{i:02d}.txt").write_bytes(text.encode())
    (folder / "ignored.bin").write_bytes(b"\xff")
    return folder


def test_every_format_gives_the_texts_in_order(inputs, texts, tokenizer, tokenizer_file, tmp_path):
    done = run("--input", inputs, "--output", tmp_path / "out" / "c", "--tokenizer", tokenizer_file, "--workers", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert "left out 1 of" in done.stderr
    assert read(tmp_path / "out" / "c", tokenizer) == texts * 5
    facts = json.loads(done.stdout)
    assert facts["documents"] == 5 * len(texts) and facts["bytes"] == 5 * sum(len(t.encode()) for t in texts)
    assert not list((tmp_path / "out").glob("*.parts")) and not list((tmp_path / "out").glob("*tmp*"))


@pytest.mark.parametrize("job_bytes", [1, 100, 5000, 1 << 30])
def test_lines_on_a_job_border_are_read_once(inputs, texts, job_bytes):
    jobs = plan_jobs(find_inputs([inputs / "a.jsonl", inputs / "d.parquet"]), job_bytes)
    # One-byte jobs of a long file would be as many as its bytes; the border logic is the same on its first and last few.
    if job_bytes > 1:
        assert [text for job in jobs for piece in job for text in read_documents(piece, "text")] == texts * 2
    else:
        starts, at = [], 0
        for line in (inputs / "a.jsonl").read_bytes().splitlines(keepends=True):
            starts.append(at)
            at += len(line)
        for start, text in zip(starts, texts):
            near = [piece for job in jobs for piece in job if piece.path.endswith("a.jsonl") and start - 2 <= piece.begin <= start + 2]
            assert [t for piece in near for t in read_documents(piece, "text") if t == text] == [text]


def test_the_result_depends_neither_on_workers_nor_on_job_size(inputs, tokenizer_file, tmp_path):
    for name, extra in (("one", ["--workers", 1]), ("two", ["--workers", 2, "--part-mb", 0.02])):
        assert run("--input", inputs, "--output", tmp_path / name, "--tokenizer", tokenizer_file, *extra).returncode == 0
    for suffix in (".bin", ".idx", ".documents.npz", ".megamoe.json"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


@pytest.fixture(scope="module")
def large(texts, tokenizer_file, tmp_path_factory):
    """Some 2 MB in 30 parts, and what an undisturbed run makes of them."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "in.jsonl").write_bytes(jsonl(texts * 20))
    command = ["--input", folder / "in.jsonl", "--tokenizer", tokenizer_file, "--part-mb", 0.08]
    assert run(*command, "--output", folder / "whole", "--workers", 1).returncode == 0
    return command, folder / "whole"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_continues_and_gives_the_same_bytes(large, tmp_path, workers):
    command, whole = [*large[0], "--workers", workers], large[1]
    process = subprocess.Popen([sys.executable, str(TOOL), *map(str, command), "--output", str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed.parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.idx"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, "finished before it could be killed: the input of this test is too small"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed.idx").exists() and not (tmp_path / "killed.bin").exists()
    kept = len(list(parts.glob("*.idx")))
    (parts / "0123.bin.tmp-1").write_bytes(b"what a killed worker left")

    again = run(*command, "--output", tmp_path / "killed", "--json")
    assert again.returncode == 0, again.stderr
    facts = json.loads(again.stdout)
    assert facts["jobs"] > facts["reused_jobs"] >= kept >= 2
    for suffix in (".bin", ".idx", ".documents.npz", ".megamoe.json", ".tokenizer.json"):
        assert Path(f"{whole}{suffix}").read_bytes() == (tmp_path / f"killed{suffix}").read_bytes()
    assert not parts.exists()


def test_workers_leave_with_a_killed_parent(large, tmp_path):
    args = [*large[0], "--output", tmp_path / "out", "--workers", 2]
    process = subprocess.Popen([sys.executable, str(TOOL), *map(str, args)], stderr=subprocess.DEVNULL)
    children: set[int] = set()
    deadline = time.monotonic() + 60
    while not list((tmp_path).glob("out.parts/*.idx")) and time.monotonic() < deadline:
        children |= {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert children
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in children)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_keeps_finished_parts_and_says_how_to_continue(texts, tokenizer_file, tmp_path):
    # Half a minute of work: the key is pressed while the tool works, however late this process gets to press it.
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts * 20) * 25)
    args = ["--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer_file, "--part-mb", 0.5, "--output", tmp_path / "out", "--workers", 2]
    # Under `nohup … &` this process ignores the key, and so would its children.
    hears = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen([sys.executable, str(TOOL), *map(str, args)], stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hears)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.parts/*.idx")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again" in err and "Traceback" not in err
    assert list(tmp_path.glob("out.parts/*.idx")) and not (tmp_path / "out.idx").exists()


def test_a_second_run_finds_the_result_and_other_input_is_refused(inputs, tokenizer_file, tmp_path):
    first = ["--input", inputs / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--workers", 1]
    assert run(*first).returncode == 0
    before = (tmp_path / "out.bin").stat().st_mtime_ns
    again = run(*first)
    assert again.returncode == 0 and "found finished" in again.stdout
    assert (tmp_path / "out.bin").stat().st_mtime_ns == before
    other = ["--input", inputs / "e00.txt", *first[2:]]
    refused = run(*other)
    assert refused.returncode == 2 and "exists" in refused.stderr and (tmp_path / "out.bin").stat().st_mtime_ns == before
    assert run(*other, "--overwrite").returncode == 0
    assert IndexedDataset(tmp_path / "out").num_documents == 1


def _latin(path):
    path.write_bytes(b'{"text": "caf\xe9"}\n')


def _truncated_gz(path):
    path.write_bytes(gzip.compress(jsonl(["some text"] * 1000))[:-20])


def _truncated_zst(path):
    path.write_bytes(zstandard.compress(jsonl([f"some text {i}" for i in range(1000)]))[:-20])


@pytest.mark.parametrize(
    "name, make, words",
    [
        ("a.txt", lambda p: p.write_bytes(b"caf\xe9"), ["not UTF-8", "0xe9 at 3", "iconv"]),
        ("a.jsonl", _latin, ["not UTF-8", "0xe9 at 13"]),
        ("a.txt", lambda p: p.write_bytes(b""), ["empty corpus"]),
        ("a.jsonl", lambda p: p.write_bytes(b'\n{"text": ""}\n{"text": null}\n'), ["empty corpus"]),
        ("a.jsonl", lambda p: p.write_bytes(b'{"text": "a"}\n{"text": '), ["line at byte 14", "not JSON"]),
        ("a.jsonl", lambda p: p.write_bytes(b'{"content": "a"}\n'), ["no field 'text'", "content"]),
        ("a.jsonl", lambda p: p.write_bytes(b'{"text": 5}\n'), ["type int"]),
        ("a.jsonl", lambda p: p.write_bytes(b'{"text": "\\ud800"}\n'), ["not valid Unicode"]),
        ("a.jsonl", lambda p: p.write_bytes(b"[1]\n"), ["no JSON object", "list"]),
        ("a.jsonl.gz", _truncated_gz, ["damaged or truncated"]),
        ("a.jsonl.gz", lambda p: p.write_bytes(b"no gzip"), ["damaged or truncated"]),
        ("a.jsonl.zst", _truncated_zst, ["damaged or truncated"]),
        ("a.jsonl.zst", lambda p: p.write_bytes(b"no zstd at all"), ["damaged"]),
        ("a.parquet", lambda p: p.write_bytes(b"no parquet"), ["no Parquet file"]),
        ("a.parquet", lambda p: pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), p), ["no column 'text'", "body"]),
        ("a.doc", lambda p: p.write_bytes(b"x"), ["known kind", ".jsonl"]),
        ("a.txt", lambda p: None, ["does not exist"]),
    ],
)
def test_bad_input_is_one_line_naming_the_file_and_leaves_nothing(tmp_path, tokenizer_file, capsys, name, make, words):
    # In this process: seventeen interpreter starts would cost more than all they test.
    sys.path.insert(0, str(TOOL.parent))
    import prepare_data

    path = tmp_path / name
    make(path)
    (tmp_path / "out").mkdir()
    code = prepare_data.main(["--input", str(path), "--output", str(tmp_path / "out" / "c"), "--tokenizer", str(tokenizer_file), "--workers", "1"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(lines) == 1
    for word in [str(path), *words]:
        assert word in lines[0], lines[0]
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_input_in_a_worker_is_one_line_too(texts, tokenizer_file, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts) + b'{"text": "caf\xe9"}\n')
    failed = run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--workers", 2, "--part-mb", 0.03)
    assert failed.returncode == 2
    assert failed.stderr.strip().count("\n") == 0 and str(tmp_path / "a.jsonl") in failed.stderr
    assert not (tmp_path / "out.idx").exists() and not (tmp_path / "out.bin").exists()


def test_help_has_an_example_and_is_quick():
    began = time.monotonic()
    shown = run("--help")
    assert shown.returncode == 0 and "example:" in shown.stdout and "--json" in shown.stdout
    assert time.monotonic() - began < 2


def test_auto_trains_a_tokenizer_and_leaves_it_beside_the_tokens(inputs, tmp_path, texts):
    done = run("--input", inputs / "a.jsonl", "--output", tmp_path / "out", "--vocab-size", 400, "--cache-dir", tmp_path / "cache", "--workers", 1)
    assert done.returncode == 0, done.stderr
    from megamoe.data.config import DataConfig
    from megamoe.data.dataset import build_datasets

    config = DataConfig(source="indexed", paths=[str(tmp_path / "out")], cache_dir=str(tmp_path / "cache"), holdout_fraction=0.3)
    train, heldout = build_datasets(config, seq_len=64, vocab_size=400, seed=0)
    assert train.describe()["documents"] + heldout.describe()["documents"] == len(texts)


def test_the_same_files_through_the_config_give_the_same_windows(inputs, tmp_path, tokenizer_file):
    assert run("--input", inputs, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--workers", 1).returncode == 0
    from megamoe.data.config import DataConfig
    from megamoe.data.dataset import build_datasets

    common = {"cache_dir": str(tmp_path / "cache"), "tokenizer": str(tokenizer_file), "num_workers": 1}
    a, _ = build_datasets(DataConfig(source="indexed", paths=[str(tmp_path / "out")], **common), seq_len=64, vocab_size=512, seed=0)
    b, _ = build_datasets(DataConfig(source="text", paths=[str(inputs)], **common), seq_len=64, vocab_size=512, seed=0)
    assert a.identity() == b.identity()
    assert all((a.window(i).labels == b.window(i).labels).all() for i in range(0, len(a), 7))
