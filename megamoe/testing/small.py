"""A small but complete run for tests: every kind of layer, real text, seconds on one core."""

from __future__ import annotations

import sysconfig
from pathlib import Path

SMALL_MODEL = [
    "model.vocab_size=512", "model.d_model=32", "model.num_layers=5", "model.full_attn_layers=[4,5]", "model.attn_res_block_size=2",
    "model.kda.num_heads=2", "model.kda.head_dim=16", "model.mla.num_heads=2", "model.mla.q_lora_rank=16", "model.mla.kv_lora_rank=16",
    "model.mla.qk_nope_head_dim=16", "model.mla.qk_rope_head_dim=8", "model.mla.v_head_dim=16", "model.ffn.dense_size=64",
    "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.expert_size=16", "model.moe.latent=16",
]


# Modules of the standard library that change little between Python versions.
_SOURCES = ("textwrap", "bisect", "heapq", "shlex", "string", "fnmatch", "calendar", "configparser", "csv", "difflib", "getopt", "gettext", "graphlib", "sched", "statistics", "colorsys")


def small_corpus(folder: Path) -> Path:
    """Some of the standard library's own sources as .txt files: real text that is always there."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in _SOURCES:
        (folder / f"{name}.txt").write_text((library / f"{name}.py").read_text())
    return folder


def small_run(folder: Path, **values: object) -> list[str]:
    """Hydra overrides of a small run that keeps all its files under `folder`; `values` come last and win.

    Keys of `values` use `__` for the dot: train__num_steps=3.
    """
    corpus = small_corpus(folder / "corpus")
    overrides = [
        *SMALL_MODEL, "data=text", f"data.paths=[{corpus}]", f"data.cache_dir={folder / 'cache'}", "data.holdout_fraction=0.2", "data.num_workers=1",
        "train.seq_len=64", "train.global_batch_tokens=512", "train.micro_batch_tokens=128", "train.num_steps=4", "train.device=cpu",
        "train.eval_interval_steps=0", "train.eval_windows=4", "monitor.wandb=off", f"run.dir={folder / 'run'}",
    ]
    return overrides + [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
