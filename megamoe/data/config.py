"""What a run reads: corpus, tokenizer, held-out split and packing. No torch here: `--help` imports this file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megamoe.utils.errors import UserError

SOURCES = ("stdlib", "text", "indexed", "chat", "stdlib_chat")
CHAT_MODES = ("thinking", "instruct")
PACKINGS = ("best_fit", "concat")
DEFAULT_CACHE_DIR = "~/.cache/megamoe"


@dataclass
class DataConfig:
    """Where tokens come from and in what order.

    Everything derived from these values (tokenizer, encoded corpus, packing index, reference lines) is cached under
    `cache_dir` by content, so that a second run with the same values starts at once.

    Attributes:
        source: `stdlib` reads the running interpreter's own library sources, `text` reads .txt, .jsonl(.gz/.zst) and
            Parquet files, `indexed` reads Megatron .bin/.idx pairs, `chat` reads conversations in OpenAI's form from .jsonl
            and Parquet files with loss on what the assistant writes, and `stdlib_chat` makes short ones of the standard
            library's own documentation.
        paths: for `text` and `chat`, files or folders; for `indexed`, prefixes (`corpus` stands for corpus.bin and corpus.idx).
        weights: share of training windows drawn from each entry of `paths`; empty means in proportion to their size.
        heldout_paths: entries like `paths` used for evaluation only; empty means that `holdout_fraction` of the
            documents of every source is set aside.
        chat_mode: `thinking` gives every assistant message a think channel, empty or not; `instruct` gives none.
        text_key: field that holds the text in .jsonl and Parquet rows.
        cache_dir: folder of derived files. The environment variable MEGAMOE_CACHE replaces the default value, not a
            value that was chosen here.
        tokenizer: `auto`, or a tokenizer.json, a tiktoken rank file, or a folder that holds one. `auto` takes the
            tokenizer that `tools/prepare_data.py` left beside indexed data, and trains one on raw text otherwise.
        special_tokens: ids of special tokens of a tiktoken rank file, which does not name them itself.
        eod_token: the special token that separates documents; empty means the first known name the tokenizer has.
        vocab_size: size of the tokenizer that `auto` trains; 0 means the model's vocabulary.
        holdout_fraction: share of documents held out, decided by a hash of each document's content: the same text is
            always on the same side, whatever else is in the corpus.
        packing: `best_fit` keeps documents whole where they fit in a window; `concat` joins all and cuts.
        packing_window_documents: documents that best-fit packing looks at together.
        num_workers: processes that encode `text` sources; 0 means one per CPU core.
        prefetch_steps: training steps that the loader prepares ahead of the one in use.
        seed: order of documents and windows. -1 means the run's seed.
    """

    source: str = "stdlib"
    paths: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    heldout_paths: list[str] = field(default_factory=list)
    chat_mode: str = "thinking"
    text_key: str = "text"
    cache_dir: str = DEFAULT_CACHE_DIR
    tokenizer: str = "auto"
    special_tokens: dict[str, int] = field(default_factory=dict)
    eod_token: str = ""
    vocab_size: int = 0
    holdout_fraction: float = 0.05
    packing: str = "best_fit"
    packing_window_documents: int = 65536
    num_workers: int = 0
    prefetch_steps: int = 2
    seed: int = -1

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise UserError(f"data.source={self.source!r} is unknown; choose one of: {', '.join(SOURCES)}")
        if self.packing not in PACKINGS:
            raise UserError(f"data.packing={self.packing!r} is unknown; choose one of: {', '.join(PACKINGS)}")
        if self.chat_mode not in CHAT_MODES:
            raise UserError(f"data.chat_mode={self.chat_mode!r} is unknown; choose one of: {', '.join(CHAT_MODES)}")
        if self.is_chat and self.packing != "best_fit":
            raise UserError(f"data.packing={self.packing} cuts conversations apart; use data.packing=best_fit with data.source={self.source}")
        needs_paths = not self.source.startswith("stdlib")
        if not needs_paths and (self.paths or self.heldout_paths):
            key = "paths" if self.paths else "heldout_paths"
            raise UserError(f"data.{key}={getattr(self, key)} needs data.source=text, chat or indexed, not {self.source}")
        if needs_paths and not self.paths:
            raise UserError(f"data.source={self.source} needs at least one entry in data.paths, for instance data.paths=[/data/corpus]")
        if self.weights and len(self.weights) != len(self.paths):
            raise UserError(
                f"data.weights={self.weights} has {len(self.weights)} entries for {len(self.paths)} data.paths; "
                "give one weight per path, or none for weights in proportion to size"
            )
        # `not x > 0` also catches NaN, which compares false with everything.
        if any(not weight > 0 or weight == float("inf") for weight in self.weights):
            raise UserError(f"data.weights={self.weights}: every weight must be a finite number above 0; drop a path to leave it out")
        if not 0 <= self.holdout_fraction < 1:
            raise UserError(f"data.holdout_fraction={self.holdout_fraction} must be at least 0 and below 1, for instance 0.05")
        if self.packing_window_documents < 1:
            raise UserError(f"data.packing_window_documents={self.packing_window_documents} must be at least 1, for instance 65536")
        if self.vocab_size != 0 and self.vocab_size < 257:
            raise UserError(f"data.vocab_size={self.vocab_size} must be 0 (the model's) or at least 257 (256 bytes and end of document)")
        if self.num_workers < 0:
            raise UserError(f"data.num_workers={self.num_workers} must be 0 (one per CPU core) or more")
        if self.prefetch_steps < 1:
            raise UserError(f"data.prefetch_steps={self.prefetch_steps} must be at least 1")
        if self.seed < -1:
            raise UserError(f"data.seed={self.seed} must be 0 or more, or -1 for the run's seed")

    @property
    def is_chat(self) -> bool:
        """Whether the source is conversations."""
        return self.source in ("chat", "stdlib_chat")

    def cache_path(self) -> Path:
        """The cache folder with `~` and MEGAMOE_CACHE applied. Not created here."""
        chosen = self.cache_dir
        if chosen == DEFAULT_CACHE_DIR:
            chosen = os.environ.get("MEGAMOE_CACHE") or chosen
        return Path(chosen).expanduser()
