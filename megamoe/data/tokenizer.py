"""Text to token ids and back: one trained here, a tokenizer.json, or a tiktoken rank file (Kimi's format).

Letter: V vocabulary size.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from megamoe.utils.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
# Structure of conversations (`data/chat.py`). Trained tokenizers have them from the start, so that a base model can be fine-tuned.
CHAT_MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_EOD_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "[EOS]", "</s>", "<eos>", "<|eod|>")

# How tiktoken rank files for Kimi models split text before merging: Han runs alone, digits in groups of up to three.
_LETTER_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LETTER_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_KIMI_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_LETTER_UPPER}*{_LETTER_LOWER}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_LETTER_UPPER}+{_LETTER_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class Tokenizer(ABC):
    """What the data plane needs of a tokenizer. Text never becomes a special token: `<|endoftext|>` in a document is text.

    Attributes:
        vocab_size: V, one more than the largest id.
        eod_token, eod_id: the end-of-document token.
        fingerprint: hash of vocabulary, merges and special tokens. Equal fingerprints give equal ids.
        path: the file it was loaded from.
        special_tokens: what `load_tokenizer` must be told to load that file again: names and ids for a rank file.
        special_ids: ids of all special tokens by name.
    """

    vocab_size: int
    eod_token: str
    eod_id: int
    fingerprint: str
    path: Path
    special_tokens: dict[str, int]
    special_ids: dict[str, int]

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text, (n,) int32."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, on all cores that RAYON_NUM_THREADS allows."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def bytes_per_token_V(self) -> np.ndarray:
        """(V,) int32: bytes of text each id stands for; 0 for special tokens and unused ids."""

    @abstractmethod
    def save(self, path_stem: Path) -> Path:
        """Copy the tokenizer's file to path_stem + its suffix, from where `load_tokenizer` reads it again."""


class _HuggingFaceTokenizer(Tokenizer):
    def __init__(self, path: Path, eod_token: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a broken file
            raise UserError(f"data.tokenizer={path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}") from error
        self.path = path
        self.special_tokens = {}
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        special = {t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special}
        self.special_ids = {name: vocab[name] for name in sorted(special)}
        self.eod_token = _find_eod(special, eod_token, path)
        self.eod_id = vocab[self.eod_token]
        content = json.dumps([json.loads(self._tokenizer.to_str()), self.eod_id], sort_keys=True)
        self.fingerprint = xxhash.xxh3_128_hexdigest(content.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def bytes_per_token_V(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, np.int32)
        added = self._tokenizer.get_added_tokens_decoder()
        # A byte-level vocabulary writes each byte as one character; others write text, ▁ for a space and <0xAB> for bytes.
        byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            elif byte_level:
                sizes[index] = len(token)
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                sizes[index] = 1
            else:
                sizes[index] = len(token.replace("▁", " ").encode())
        return sizes

    def save(self, path_stem: Path) -> Path:
        return _copy_whole(self.path, Path(f"{path_stem}.tokenizer.json"))


class _TiktokenTokenizer(Tokenizer):
    def __init__(self, path: Path, special_tokens: dict[str, int], eod_token: str):
        import tiktoken

        self.path = path
        self._ranks = _read_rank_file(path)
        special = dict(special_tokens) or _special_tokens_beside(path)
        if not special:
            special = {END_OF_DOCUMENT: len(self._ranks)}
        taken = [name for name, index in special.items() if index < len(self._ranks)]
        if taken:
            raise UserError(f"data.special_tokens.{taken[0]}={special[taken[0]]} is the id of an ordinary token of {path}; ids from {len(self._ranks)} on are free")
        self.special_tokens = self.special_ids = special
        self._encoding = tiktoken.Encoding(path.stem, pat_str=_KIMI_SPLIT, mergeable_ranks=self._ranks, special_tokens=special)
        self.vocab_size = max(len(self._ranks), max(special.values()) + 1)
        self.eod_token = _find_eod(set(special), eod_token, path)
        self.eod_id = special[self.eod_token]
        h = xxhash.xxh3_128(path.read_bytes())
        h.update(json.dumps([_KIMI_SPLIT, sorted(special.items()), self.eod_id]).encode())
        self.fingerprint = h.hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        threads = int(os.environ.get("RAYON_NUM_THREADS", os.cpu_count() or 1))
        return [np.array(ids, np.int32) for ids in self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)]

    def decode(self, ids: Iterable[int]) -> str:
        special = set(self.special_tokens.values())
        return self._encoding.decode([int(i) for i in ids if int(i) not in special])

    def bytes_per_token_V(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, index in self._ranks.items():
            sizes[index] = len(token)
        return sizes

    def save(self, path_stem: Path) -> Path:
        target = Path(f"{path_stem}.tokenizer.tiktoken")
        # Names of special tokens are not in a rank file; Hugging Face's convention keeps them in a file beside it.
        decoder = {str(index): {"content": name, "special": True} for name, index in self.special_tokens.items()}
        Path(f"{path_stem}.tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}, indent=1))
        return _copy_whole(self.path, target)


def load_tokenizer(path: str | Path, *, special_tokens: dict[str, int] | None = None, eod_token: str = "") -> Tokenizer:
    """Load a tokenizer.json, a tiktoken rank file, or a folder that holds one of them.

    Args:
        path: `tokenizer.json`, `*.tiktoken`, `tiktoken.model`, or a folder (a Kimi tokenizer folder and a run folder work unchanged).
        special_tokens: ids of special tokens of a rank file; empty reads them from tokenizer_config.json beside it.
        eod_token: name of the end-of-document token; empty means the first known name among the special tokens.

    Raises:
        UserError: nothing readable at `path`, or no end-of-document token.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        found = [p for name in ("tokenizer.json", "tiktoken.model") if (p := path / name).is_file()] or sorted([*path.glob("*.tiktoken"), *path.glob("*.tokenizer.json")])
        if not found:
            raise UserError(f"data.tokenizer={path} holds neither tokenizer.json nor tiktoken.model nor *.tiktoken nor *.tokenizer.json")
        path = found[0]
    if not path.is_file():
        raise UserError(f"data.tokenizer={path} does not exist; name a tokenizer.json, a tiktoken rank file or a folder with one, or use auto")
    if path.suffix == ".json":
        return _HuggingFaceTokenizer(path, eod_token)
    return _TiktokenTokenizer(path, special_tokens or {}, eod_token)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE and write it to `path` as tokenizer.json.

    Deterministic: the same texts in the same order give the same file on any number of threads. `<|endoftext|>` is
    id 0, the 256 bytes follow, then merges, then the markers of conversations (left out where there is no room for
    them); a corpus with too few pairs gives a smaller vocabulary than asked for.
    """
    markers = CHAT_MARKERS if vocab_size >= 257 + len(CHAT_MARKERS) else ()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(markers),
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(markers))
    # Not tokenizer.save: on a full disk that raises a bare Exception.
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _find_eod(special: set[str], eod_token: str, path: Path) -> str:
    if eod_token:
        if eod_token not in special:
            raise UserError(f"data.eod_token={eod_token!r} is not a special token of {path}; it has: {', '.join(sorted(special)[:8])}")
        return eod_token
    for name in _EOD_NAMES:
        if name in special:
            return name
    raise UserError(f"{path} has no end-of-document token of a known name; set data.eod_token to one of its special tokens: {', '.join(sorted(special)[:8])}")


def _read_rank_file(path: Path) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one
            raise UserError(f"data.tokenizer={path} is no tiktoken rank file: line {number} is not `base64 rank`") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise UserError(f"data.tokenizer={path} is no tiktoken rank file: its ranks are not 0, 1, 2, …")
    return ranks


def _special_tokens_beside(path: Path) -> dict[str, int]:
    """Special tokens from the tokenizer_config.json that Hugging Face folders keep beside the rank file."""
    name = path.name.replace("tokenizer.tiktoken", "tokenizer_config.json") if path.name.endswith("tokenizer.tiktoken") else "tokenizer_config.json"
    config = path.with_name(name)
    if not config.is_file():
        return {}
    decoder = json.loads(config.read_text()).get("added_tokens_decoder", {})
    return {entry["content"]: int(index) for index, entry in decoder.items()}


def _copy_whole(source: Path, target: Path) -> Path:
    scratch = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.copyfile(source, scratch)
    os.replace(scratch, target)
    return target
