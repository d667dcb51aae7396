"""The stream that reaches the model: each token of each document predicted once, documents apart, bytes counted exactly.

Not covered: reading from an object store; corpora beyond memory (files are mapped, indexes too, but no test is that big).
"""

import numpy as np
import pytest
import torch

from megamoe.data.batch import IGNORE_LABEL, Window, collate
from megamoe.data.config import DataConfig
from megamoe.data.corpus import text_hash, write_documents
from megamoe.data.dataset import build_datasets
from megamoe.data.indexed import IndexedDataset, IndexedWriter
from megamoe.data.tokenizer import load_tokenizer, train_tokenizer

SEQ_LEN = 128


def config(tmp_path, corpus, **values):
    return DataConfig(source="indexed", paths=[str(corpus)], cache_dir=str(tmp_path / "cache"), **{"holdout_fraction": 0.3, **values})


def build(config, seq_len=SEQ_LEN, vocab_size=512, seed=1):
    return build_datasets(config, seq_len=seq_len, vocab_size=vocab_size, seed=seed)


def pieces_of(dataset, num_windows=None):
    """(inputs, labels) of every document piece of one pass."""
    for i in range(len(dataset) if num_windows is None else num_windows):
        window = dataset.window(i)
        ends = [*window.starts[1:], len(window.tokens)]
        for begin, end in zip(window.starts, ends):
            if window.labels[begin] != IGNORE_LABEL:
                yield window.tokens[begin:end], window.labels[begin:end]
            else:
                assert (window.labels[begin:] == IGNORE_LABEL).all() and end == len(window.tokens), "padding is last and whole"


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_pieces_join_to_the_documents_with_every_token_predicted_once(tmp_path, corpus, texts, tokenizer, packing):
    train, heldout = build(config(tmp_path, corpus, packing=packing))
    found = []
    for dataset in (train, heldout):
        open_pieces = {}
        for inputs, labels in pieces_of(dataset):
            assert np.array_equal(inputs[1:], labels[:-1]), "inside a piece the label is the next input"
            open_pieces.setdefault(int(inputs[0]), []).append((inputs, labels))
        total = sum(len(labels) for pieces in open_pieces.values() for _, labels in pieces)
        assert total == int(dataset.sources[0].documents.pairs_n.sum())
        documents = dataset.sources[0].documents
        found += [tokenizer.decode(documents.tokens(d)) for d in range(len(documents))]
        # The multiset of (input, label) pairs equals that of the documents, each framed by end-of-document tokens.
        expected = np.concatenate([_framed_pairs(tokenizer, t) for t in found[-len(documents) :]])
        actual = np.concatenate([np.stack([i, l], axis=1) for pieces in open_pieces.values() for i, l in pieces])
        assert np.array_equal(_sorted_rows(expected), _sorted_rows(actual))
    assert sorted(found) == sorted(texts)


def _framed_pairs(tokenizer, text):
    framed = np.concatenate([[tokenizer.eod_id], tokenizer.encode(text), [tokenizer.eod_id]])
    return np.stack([framed[:-1], framed[1:]], axis=1)


def _sorted_rows(rows):
    return rows[np.lexsort(rows.T)]


def test_a_document_longer_than_a_window_continues_with_the_token_at_the_cut(tmp_path, corpus):
    train, _ = build(config(tmp_path, corpus, holdout_fraction=0.0), seq_len=32)
    documents = train.sources[0].documents
    d = int(np.argmax(documents.tokens_n))
    stream = np.concatenate([[0], documents.tokens(d), [0]])
    for start in range(0, len(stream) - 1, 32):
        length = min(32, len(stream) - 1 - start)
        assert np.array_equal(documents.read(d, start, length), stream[start : start + length + 1])


def test_bytes_of_one_pass_are_the_bytes_of_the_texts(tmp_path, corpus, texts):
    train, heldout = build(config(tmp_path, corpus))
    total = sum(dataset.window(i).num_bytes for dataset in (train, heldout) for i in range(len(dataset)))
    assert total == sum(len(text.encode()) for text in texts)
    assert train.describe()["bytes"] + heldout.describe()["bytes"] == total
    for i in range(len(train)):
        window = train.window(i)
        # A byte-level vocabulary spells each byte as one character.
        expected = [len(train.tokenizer._tokenizer.id_to_token(int(label))) for label in window.labels if label > 0]
        assert window.num_bytes == sum(expected), "bytes of the labels, not of the inputs"


def test_held_out_documents_depend_on_their_text_alone(tmp_path, corpus, texts, tokenizer):
    _, heldout = build(config(tmp_path, corpus))
    expected = sorted(text for text in texts if text_hash(text) < 0.3 * 2**64)
    assert expected, "the fixture must hold something out"
    documents = heldout.sources[0].documents
    assert sorted(tokenizer.decode(documents.tokens(d)) for d in range(len(documents))) == expected

    # Another vocabulary, another order, more documents around: the same texts are held out.
    train_tokenizer(texts, 300, tmp_path / "small.json")
    small = load_tokenizer(tmp_path / "small.json")
    write_documents(["something else", *reversed(texts)], small, tmp_path / "again")
    _, again = build(config(tmp_path, tmp_path / "again", tokenizer=str(tmp_path / "small.json")))
    documents = again.sources[0].documents
    texts_again = {small.decode(documents.tokens(d)) for d in range(len(documents))}
    assert texts_again - {"something else"} == set(expected)


def test_two_builds_give_equal_windows_and_another_seed_others(tmp_path, corpus):
    first, _ = build(config(tmp_path, corpus))
    again, _ = build(config(tmp_path / "elsewhere", corpus))
    other, _ = build(config(tmp_path, corpus), seed=2)
    own_seed, _ = build(config(tmp_path, corpus, seed=1), seed=2)
    n = len(first)
    same = [[np.array_equal(first.window(i).tokens, d.window(i).tokens) for i in range(n)] for d in (again, other, own_seed)]
    assert all(same[0]) and not all(same[1]) and all(same[2])
    assert first.identity() == again.identity() == own_seed.identity() != other.identity()


def test_training_goes_on_after_one_pass_and_held_out_windows_repeat(tmp_path, corpus):
    train, heldout = build(config(tmp_path, corpus))
    n = len(train)
    passes = [[train.window(e * n + i).tokens.tobytes() for i in range(n)] for e in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1]
    assert np.array_equal(heldout.window(3).tokens, heldout.window(3 + len(heldout)).tokens)


def test_files_of_other_makers_are_read_with_or_without_end_of_document(tmp_path, texts, tokenizer, tokenizer_file):
    for name, tail in (("bare", []), ("ended", [tokenizer.eod_id])):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for text in texts:
                writer.add_document(np.array([*tokenizer.encode(text), *tail]))
            writer.finish()
    bare, ended = (build(config(tmp_path, tmp_path / name, tokenizer=str(tokenizer_file)))[0] for name in ("bare", "ended"))
    assert len(bare) == len(ended)
    assert all(np.array_equal(bare.window(i).labels, ended.window(i).labels) for i in range(len(bare)))
    assert bare.describe()["bytes"] == ended.describe()["bytes"]


def test_a_blend_draws_by_weight_and_says_so(tmp_path, corpus, texts, tokenizer):
    write_documents(texts[:3], tokenizer, tmp_path / "small")
    blend = DataConfig(source="indexed", paths=[str(corpus), str(tmp_path / "small")], weights=[1, 3], cache_dir=str(tmp_path / "cache"), holdout_fraction=0.0)
    train, heldout = build(blend)
    assert heldout is None
    assert [row["share"] for row in train.describe()["sources"]] == [0.25, 0.75]
    located = [train._order.locate(i)[0] for i in range(400)]
    assert abs(np.mean(located) - 0.75) < 0.01
    assert "75.0%" in train.summary()[1]
    swapped = DataConfig(source="indexed", paths=blend.paths, weights=[3, 1], cache_dir=blend.cache_dir, holdout_fraction=0.0)
    assert build(swapped)[0].identity()["blend"] != train.identity()["blend"]


def test_held_out_paths_replace_the_split(tmp_path, corpus, texts, tokenizer):
    write_documents(texts[:2], tokenizer, tmp_path / "eval")
    train, heldout = build(config(tmp_path, corpus, heldout_paths=[str(tmp_path / "eval")]))
    assert train.describe()["documents"] == len(texts) and heldout.describe()["documents"] == 2


def test_standard_library_is_the_default_and_is_cached(tmp_path, monkeypatch):
    from megamoe.data import corpus as module

    files = [path for path in module.stdlib_files() if path.parent.name in ("json", "email")] + [tmp_path / "latin.py"]
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(module, "stdlib_files", lambda: files)
    default = DataConfig(cache_dir=str(tmp_path / "cache"), holdout_fraction=0.3)
    train, heldout = build(default, vocab_size=600)
    assert train.tokenizer.vocab_size == 600
    described = train.describe()["documents"] + heldout.describe()["documents"]
    assert described == sum(path.stat().st_size > 0 for path in files) - 1, "the file that is not UTF-8 is left out"
    assert train.describe()["bytes"] + heldout.describe()["bytes"] == sum(path.stat().st_size for path in files[:-1])
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.suffix in (".bin", ".json", ".npy")}
    again, _ = build(default, vocab_size=600)
    assert again.identity() == train.identity()
    assert built == {path: path.stat().st_mtime_ns for path in built}


def test_what_a_killed_build_left_is_removed_and_never_read(tmp_path, corpus):
    build(config(tmp_path, corpus))
    packing = tmp_path / "cache" / "packing"
    finished = next(path for path in packing.iterdir() if path.is_dir())
    finished.rename(packing / f"{finished.name}.tmp-999999")
    (packing / f"{finished.name}.tmp-999999" / "length_P.npy").write_bytes(b"half")
    train, _ = build(config(tmp_path, corpus))
    train.window(0)
    assert finished.is_dir() and not list(packing.glob("*.tmp-*"))


def _refuse(words, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        build(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_bad_inputs_are_one_line(tmp_path, corpus, texts, tokenizer, tokenizer_file):
    _refuse(["model.vocab_size=500", "512"], config(tmp_path, corpus), vocab_size=500)
    _refuse(["seq_len=0"], config(tmp_path, corpus), seq_len=0)
    _refuse(["/nowhere/corpus", "does not exist"], config(tmp_path, "/nowhere/corpus"))
    _refuse(["/nowhere/t.json", "does not exist"], config(tmp_path, corpus, tokenizer="/nowhere/t.json"))
    text = {"source": "text", "cache_dir": str(tmp_path / "cache")}
    _refuse(["/nowhere", "does not exist"], DataConfig(paths=["/nowhere"], **text))
    (tmp_path / "empty").mkdir()
    _refuse([str(tmp_path / "empty"), "empty corpus"], DataConfig(paths=[str(tmp_path / "empty")], **text))
    (tmp_path / "empty" / "a.txt").write_text("")
    _refuse(["empty corpus"], DataConfig(paths=[str(tmp_path / "empty")], **text))
    _refuse([str(tmp_path / "empty" / "a.txt"), "empty corpus"], DataConfig(paths=[str(tmp_path / "empty")], tokenizer=str(tokenizer_file), **text))
    (tmp_path / "empty" / "a.txt").write_bytes(b"caf\xe9")
    _refuse([str(tmp_path / "empty" / "a.txt"), "not UTF-8", "0xe9 at 3"], DataConfig(paths=[str(tmp_path / "empty")], **text))

    with IndexedWriter(tmp_path / "none", np.uint16) as writer:
        writer.finish()
    _refuse(["none", "empty corpus"], config(tmp_path, tmp_path / "none", tokenizer=str(tokenizer_file)))
    with IndexedWriter(tmp_path / "large", np.uint16) as writer:
        writer.add_document(np.array([1, 512]))
        writer.finish()
    _refuse(["large.bin", "token id 512"], config(tmp_path, tmp_path / "large", tokenizer=str(tokenizer_file)))
    _refuse(["large", "data.tokenizer"], config(tmp_path, tmp_path / "large"))

    train_tokenizer(texts, 400, tmp_path / "other.json")
    _refuse(["was made with tokenizer"], config(tmp_path, corpus, tokenizer=str(tmp_path / "other.json")))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "cache").write_text("a file where the folder should be")
    _refuse(["data.cache_dir", "MEGAMOE_CACHE"], config(tmp_path, corpus))


def test_collate_joins_windows_and_keeps_every_border():
    a = Window(np.array([0, 5, 0, 7]), np.array([5, 6, 7, 8]), np.array([0, 2]), 9)
    b = Window(np.array([0, 5, 0, 0]), np.array([5, -100, -100, -100]), np.array([0, 1]), 2)
    batch = collate([a, b])
    assert batch.tokens_T.tolist() == [0, 5, 0, 7, 0, 5, 0, 0] and batch.tokens_T.dtype == torch.int64
    assert batch.labels_T.tolist() == [5, 6, 7, 8, 5, -100, -100, -100] and batch.labels_T.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 8] and batch.cu_seqlens.dtype == torch.int32
    assert batch.positions_T.tolist() == [0, 1, 0, 1, 0, 0, 1, 2] and batch.positions_T.dtype == torch.int64
    assert (batch.num_target_tokens, batch.num_bytes, batch.max_document_tokens, batch.num_tokens) == (5, 11, 3, 8)
    moved = batch.to("cpu")
    assert torch.equal(moved.tokens_T, batch.tokens_T) and moved.num_bytes == 11
    with pytest.raises(ValueError, match="at least one window"):
        collate([])
