"""Existing Megatron corpora are read as they are, and ours are read by Megatron: byte for byte, both directions.

The oracle is megatron-core's own IndexedDataset. Not covered: multimodal files (their modes are passed over), S3.
"""

import struct

import numpy as np
import pytest

from megamoe.data.indexed import IndexedDataset, IndexedWriter, token_dtype

DOCUMENTS = [[5, 1, 2], [], [499], list(range(300)), [7, 7]]


@pytest.fixture(scope="module")
def megatron():
    """The oracle, from the test extra. Its import is slow and wordy."""
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="install megatron-core==0.16.1 (test extra)")


def write(prefix, documents, vocab_size=512):
    with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_document(np.array(document))
        writer.finish()
    return prefix


@pytest.mark.parametrize("vocab_size", [512, 65_499, 65_500, 160_000])
def test_megatron_reads_what_we_write_and_would_write_the_same_bytes(megatron, tmp_path, vocab_size):
    documents = [[min(t * 7, vocab_size - 1) for t in d] for d in DOCUMENTS if d] + [[vocab_size - 1]]
    ours = write(tmp_path / "ours", documents, vocab_size)

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=megatron.DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()

    read = megatron.IndexedDataset(str(ours))
    assert [read[i].tolist() for i in range(len(read))] == documents
    assert read.document_indices.tolist() == list(range(len(documents) + 1))


def test_we_read_megatron_documents_of_several_sequences(megatron, tmp_path):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(np.arange(9), [4, 0, 5])
    builder.add_document(np.array([8, 9]), [2])
    builder.finalize(str(tmp_path / "theirs.idx"))
    read = IndexedDataset(tmp_path / "theirs")
    assert [read.document(i).tolist() for i in range(read.num_documents)] == [list(range(9)), [8, 9]]


def test_what_is_written_is_read_again_with_empty_documents(tmp_path):
    read = IndexedDataset(write(tmp_path / "corpus", DOCUMENTS))
    assert [read.document(i).tolist() for i in range(read.num_documents)] == DOCUMENTS
    assert not read.document(0).flags.writeable
    assert IndexedDataset(f"{tmp_path}/corpus.bin").num_documents == len(DOCUMENTS), "a suffix is tolerated"
    assert IndexedDataset(write(tmp_path / "none", [])).num_documents == 0


def test_joining_pairs_equals_writing_all_documents(tmp_path):
    first, second = write(tmp_path / "a", DOCUMENTS[:2]), write(tmp_path / "b", DOCUMENTS[2:])
    whole = write(tmp_path / "whole", DOCUMENTS)
    with IndexedWriter(tmp_path / "joined", token_dtype(512)) as writer:
        writer.add_pair(IndexedDataset(first))
        writer.add_pair(IndexedDataset(second))
        writer.finish()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"joined{suffix}").read_bytes() == (tmp_path / f"{whole.name}{suffix}").read_bytes()


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "corpus", token_dtype(512)) as writer:
        writer.add_document(np.arange(5))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def _patch(path, at, raw):
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, names, word",
    [
        (lambda p: (p / "c.bin").unlink(), "c.bin", "does not exist"),
        (lambda p: (p / "c.idx").unlink(), "c.idx", "does not exist"),
        (lambda p: (p / "c.bin").write_bytes((p / "c.bin").read_bytes()[:-1]), "c.bin", "is truncated"),
        (lambda p: (p / "c.bin").write_bytes((p / "c.bin").read_bytes() + b"\0\0"), "c.bin", "does not belong"),
        (lambda p: (p / "c.idx").write_bytes((p / "c.idx").read_bytes()[:-3]), "c.idx", "truncated"),
        (lambda p: (p / "c.idx").write_bytes((p / "c.idx").read_bytes()[:12]), "c.idx", "inside its header"),
        (lambda p: (p / "c.idx").write_bytes(b""), "c.idx", "not a Megatron index"),
        (lambda p: _patch(p / "c.idx", 0, b"TNTIDX\0\0\0"), "c.idx", "not a Megatron index"),
        (lambda p: _patch(p / "c.idx", 9, struct.pack("<Q", 2)), "c.idx", "version 2"),
        (lambda p: _patch(p / "c.idx", 17, bytes([7])), "c.idx", "dtype code 7"),
        (lambda p: _patch(p / "c.idx", 17, bytes([99])), "c.idx", "dtype code 99"),
        (lambda p: _patch(p / "c.idx", 34, struct.pack("<ii", 4, -1)), "c.idx", "do not follow"),
        (lambda p: _patch(p / "c.idx", (p / "c.idx").stat().st_size - 8, struct.pack("<q", 99)), "c.idx", "document marks"),
    ],
)
def test_a_damaged_pair_is_refused_in_one_line_naming_the_file(tmp_path, damage, names, word):
    write(tmp_path / "c", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(ValueError) as caught:
        IndexedDataset(tmp_path / "c")
    message = str(caught.value)
    assert names in message and word in message and "\n" not in message
