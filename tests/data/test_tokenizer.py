"""Ids, bytes per id and the fingerprint decide what loss and bits per byte mean; text must never turn into a control token.

Not covered: SentencePiece models; ids of released Kimi tokenizers (no rank file of theirs is at hand).
"""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from megamoe.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer

HARD = ["", " ", "\n\r\n\t", "a" * 5000, "naïve 数据 🙂\u200d🙂", "\x00\x01\x7f", "<|endoftext|>", "  leading", "\ufeffbom", "123456789 3.14"]


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory):
    """A rank file with all bytes and a few merges, as Kimi folders hold it."""
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", b"in", b"ing"]
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


def test_trained_ids_start_with_end_of_document_then_the_bytes(tokenizer):
    assert tokenizer.eod_id == 0 and tokenizer.eod_token == END_OF_DOCUMENT
    assert tokenizer.vocab_size == 512
    assert tokenizer.bytes_per_token_V()[1:257].tolist() == [1] * 256


@pytest.mark.parametrize("kind", ["json", "tiktoken"])
def test_round_trip_and_bytes_per_token_are_exact(kind, tokenizer, rank_file, texts):
    tokenizer = tokenizer if kind == "json" else load_tokenizer(rank_file)
    bytes_V = tokenizer.bytes_per_token_V()
    assert bytes_V.shape == (tokenizer.vocab_size,)
    for text, ids in zip(HARD + texts, tokenizer.encode_batch(HARD + texts)):
        assert tokenizer.decode(ids) == text
        assert bytes_V[ids].sum() == len(text.encode())
        assert np.array_equal(ids, tokenizer.encode(text))
    assert bytes_V[tokenizer.eod_id] == 0


@pytest.mark.parametrize("kind", ["json", "tiktoken"])
def test_the_name_of_a_special_token_in_a_text_stays_text(kind, tokenizer, rank_file):
    tokenizer = tokenizer if kind == "json" else load_tokenizer(rank_file)
    ids = tokenizer.encode(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod_id not in ids.tolist()


def test_training_gives_the_same_file_on_any_number_of_threads(texts, tokenizer_file, tmp_path):
    code = (
        "import sys, json, pathlib; from megamoe.data.tokenizer import train_tokenizer;"
        "train_tokenizer(json.load(open(sys.argv[1])), 512, pathlib.Path(sys.argv[2]))"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    for threads in ("1", "3"):
        out = tmp_path / f"{threads}.json"
        subprocess.run([sys.executable, "-c", code, tmp_path / "texts.json", out], check=True, timeout=120, env={**os.environ, "RAYON_NUM_THREADS": threads})
        assert out.read_bytes() == tokenizer_file.read_bytes()


def test_a_corpus_too_small_for_the_vocabulary_gives_a_smaller_one(tmp_path):
    train_tokenizer(["abab abab"], 5000, tmp_path / "t.json")
    assert 257 <= load_tokenizer(tmp_path / "t.json").vocab_size < 270


def test_the_fingerprint_follows_the_vocabulary_not_the_path(texts, tokenizer, tokenizer_file, tmp_path):
    stem = tmp_path / "copy"
    assert load_tokenizer(tokenizer.save(stem)).fingerprint == tokenizer.fingerprint
    train_tokenizer(texts, 511, tmp_path / "other.json")
    assert load_tokenizer(tmp_path / "other.json").fingerprint != tokenizer.fingerprint


def test_a_kimi_folder_works_unchanged(rank_file, tmp_path):
    folder = tmp_path / "kimi"
    folder.mkdir()
    (folder / "tiktoken.model").write_bytes(rank_file.read_bytes())
    special = {"261": {"content": "[BOS]", "special": True}, "262": {"content": "[EOS]", "special": True}, "300": {"content": "[PAD]", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.eod_token) == (301, 262, "[EOS]")
    assert tokenizer.encode("the").tolist() == [257]
    assert tokenizer.encode(" the").tolist() == [258]
    assert load_tokenizer(folder, eod_token="[PAD]").eod_id == 300
    copy = load_tokenizer(tokenizer.save(tmp_path / "prefix"))
    assert copy.fingerprint == tokenizer.fingerprint, "names of special tokens travel with the copy"


def test_digits_split_in_threes_and_han_runs_alone(rank_file):
    encoding = load_tokenizer(rank_file)._encoding
    pieces = encoding._core_bpe.encode_ordinary  # ids are bytes here, so splits are looked at through a merge
    assert pieces("1234") == [ord(c) for c in "1234"]
    tokens = [bytes([b]) for b in range(256)] + [b"34", "据x".encode()]
    import tiktoken

    merged = tiktoken.Encoding("t", pat_str=encoding._pat_str, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens={})
    assert 256 not in merged.encode_ordinary("1234"), "3 and 4 are in different groups"
    assert 256 in merged.encode_ordinary("134")
    assert 257 not in merged.encode_ordinary("据x")


@pytest.mark.parametrize(
    "name, content, word",
    [
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("tokenizer.json", b"not json", "tokenizer.json"),
        ("x.tiktoken", b"YQ== 0\nnonsense\n", "line 2"),
        ("x.tiktoken", b"YQ== 0\nYg== 5\n", "ranks"),
        ("x.tiktoken", b"", "ranks"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_and_unknown_names_say_what_would_work(tmp_path, tokenizer_file, rank_file):
    with pytest.raises(ValueError, match="does not exist.*auto"):
        load_tokenizer(tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="holds neither"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="endoftext"):
        load_tokenizer(tokenizer_file, eod_token="[EOS]")
    with pytest.raises(ValueError, match="ids from 261 on are free"):
        load_tokenizer(rank_file, special_tokens={"[EOS]": 5})
    with pytest.raises(ValueError, match="data.eod_token"):
        load_tokenizer(rank_file, special_tokens={"[STOP]": 261})
