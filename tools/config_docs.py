"""Write docs/config.md: every key of a run with its type, default and meaning, read from the dataclasses themselves.

    python tools/config_docs.py            rewrite docs/config.md
    python tools/config_docs.py --check    exit 1 when the file no longer says what the code says

Meanings come from where the code keeps them: the `Attributes:` part of a section's docstring, the string below a field,
the docstring of its enum. Keys that share a line there, or whose name says it all beside the code, get a sentence of
their own in `MEANINGS`. A key without any fails here, so that none can be added in silence.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch.schema import compose, default_choices, fields, groups, to_dict  # noqa: E402
from megamoe.monitor.metrics import METRICS_FILE, ROW_KEYS  # noqa: E402
from megamoe.train.config import Config  # noqa: E402
from megamoe.utils.errors import UserError  # noqa: E402

TARGET = ROOT / "docs" / "config.md"

HEAD = """\
# Configuration

*Written by `python tools/config_docs.py` from the dataclasses in `megamoe/*/config.py`; a test keeps it true.*

A run is one typed `Config`. `hydra_conf/` composes it, the command line changes it:

```
python launch/pretrain.py train.num_steps=1000 optim=adamw optim.lr=2e-3   # key=value, group=file
python launch/pretrain.py model.full_attn_layers=[4,8,9] model.moe.latent=null   # lists and null
python launch/pretrain.py --cfg job --resolve stage=cooldown_256k          # print it, run nothing
```

Later wins: the files of the groups, then `stage`, then `experiment`, then `debug`, then the command line. An unknown
key, a wrong type or an impossible combination ends in one line with the key, the value and the way out, exit code 2.
Secrets never belong in the configuration: W&B reads `WANDB_API_KEY` from the environment.

"Default" is the value of `python launch/pretrain.py` without overrides.

## Groups

| group | files (default first) |
| --- | --- |
"""

MEANINGS = {
    "model.name": "what run folders and checkpoints remember the model by",
    "model.vocab_size": "size of the vocabulary; the tokenizer's largest id must fit",
    "model.d_model": "model width",
    "model.num_layers": "number of layers, the extra multi-token-prediction block not counted",
    "model.norm_eps": "epsilon of every RMSNorm that has none of its own",
    "model.init_std": "standard deviation of the initial weights",
    "model.tie_embeddings": "whether the output head is the embedding",
    "model.attn_res_block_size": "layers per AttnRes block",
    "model.kda.num_heads": "heads",
    "model.kda.head_dim": "width of a head's keys and values; the fast kernels want 128",
    "model.kda.conv_kernel": "taps of the short causal convolution in front of q, k and v",
    "model.kda.backend": "backend of the op `kda_chunk`: `auto`, or a name from the first screen",
    "model.mla.num_heads": "heads",
    "model.mla.kv_lora_rank": "width of the latent that keys and values are made from",
    "model.mla.qk_nope_head_dim": "width of a head's own part of query and key",
    "model.mla.qk_rope_head_dim": "width of the part whose key all heads share",
    "model.mla.v_head_dim": "width of a head's value",
    "model.mla.output_gate": "whether a sigmoid gate made from the layer input scales the attention output",
    "model.mla.rope_theta": "base of the rotary frequencies",
    "model.mla.backend": "backend of the attention core: `auto`, or a name from the first screen",
    "model.ffn.dense_size": "inner width of the dense MLP",
    "model.ffn.situ_beta": "bound of SiTU's gated branch",
    "model.ffn.situ_linear_beta": "bound of SiTU's linear branch",
    "model.moe.num_experts": "routed experts of a layer",
    "model.moe.top_k": "routed experts a token goes to",
    "model.moe.expert_size": "inner width of an expert",
    "model.moe.latent_norm": "RMSNorm between the routed experts' sum and the projection back to the model width",
    "model.moe.first_dense_layers": "layers at the beginning that have the dense MLP instead of experts",
    "model.moe.routed_scaling_factor": "factor on the routed experts' sum",
    "model.moe.histogram_bins": "`quantile`: bins of the score histogram",
    "model.moe.sign_rate": "`sign`: how far a bias moves in a step",
    "model.moe.threshold_step": "`threshold`: size of the bias",
    "model.moe.threshold_high": "`threshold`: load over the median above which an expert's bias is negative",
    "model.moe.threshold_low": "`threshold`: load over the median below which an expert's bias is positive",
    "model.moe.grouped_mlp": "backend of the op `grouped_mlp`: `auto`, or a name from the first screen",
    "model.mtp.num_layers": "1 trains a block that predicts the token after next, 0 leaves it out",
    "model.mtp.loss_weight": "weight of its loss",
    "optim.decay_fraction": "`wsd`: share of the steps at the end over which the rate decays",
    "optim.weight_decay": "decoupled weight decay, as a multiple of the learning rate",
    "optim.adam_beta1": "AdamW's decay of the first moment",
    "optim.adam_beta2": "AdamW's decay of the second moment",
    "optim.adam_eps": "AdamW's epsilon",
    "optim.lr": "peak learning rate of every parameter group",
    "optim.min_lr_ratio": "floor of the schedule, as a fraction of the peak",
    "optim.muon_momentum": "Muon's momentum, in Nesterov's form",
    "optim.muon_ns_steps": "Muon's Newton–Schulz iterations",
    "parallel.tp": "tensor-parallel ranks",
    "parallel.pp": "pipeline stages",
    "parallel.cp": "context-parallel ranks, which share a window's tokens",
    "parallel.ep": "expert-parallel ranks; folded over the dp·cp·tp ranks of a stage, which it must divide",
    "monitor.wandb": "Weights & Biases; its key comes from the environment only. `auto` goes online when a usable key and a network are there, else offline",
    "monitor.wandb_project": "project of the Weights & Biases run",
    "train.precision": "compute dtype of the model; fp64 serves proofs and needs `engine.kind=plain`",
    "train.device": "`auto` takes the GPU when there is one",
    "train.recompute": "what each block recomputes in backward instead of keeping",
    "train.eval_interval_steps": "held-out evaluation every so many steps; 0: only at the end",
    "train.eval_windows": "windows of a held-out evaluation",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args(argv)
    try:
        text = render()
    except UserError as error:
        print(f"config_docs: {error}", file=sys.stderr)
        return 2
    if args.check:
        if TARGET.is_file() and TARGET.read_text() == text:
            return 0
        print(f"config_docs: {TARGET.relative_to(ROOT)} is out of date; run python tools/config_docs.py", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text)
    return 0


def render() -> str:
    """The whole page.

    Raises:
        UserError: a key without a meaning, or a meaning without a key.
    """
    gone = sorted(set(MEANINGS) - set(fields()))
    if gone:
        raise UserError(f"{gone[0]}: has a meaning in tools/config_docs.py but is no key any more; remove it there")
    parts = [HEAD.rstrip()]
    for group, names in groups().items():
        first = default_choices()[group]
        rest = [name for name in names if name != first]
        shown = ([f"**{first}**"] if first else ["*off*"]) + rest
        parts.append(f"| `{group}` | {', '.join(shown)} |")
    values = to_dict(compose([]))
    for name, cls in typing.get_type_hints(Config).items():
        parts += ["", f"## `{name}`", "", *_section(name, cls, values[name])]
    parts += ["", f"## Metrics in `{METRICS_FILE}`", "", "One JSON object a line. Lines of `kind` `row` carry `run_id`, `attempt`, `step`, `time` and, where known:", ""]
    parts += ["| key | meaning |", "| --- | --- |", *(f"| `{key}` | {meaning} |" for key, meaning in ROW_KEYS.items())]
    parts += ["", "`megamoe.monitor.metrics.read_metrics(run)` resolves what a resumed run repeated; `read_load(run)` gives the expert load."]
    return "\n".join(parts) + "\n"


def _section(prefix: str, cls: type, values: dict) -> list[str]:
    """Summary and table of one dataclass, then of those nested in it."""
    hints, meanings = typing.get_type_hints(cls), meanings_of(cls)
    unknown = sorted(set(meanings) - set(hints))
    if unknown:
        raise UserError(f"{cls.__name__}: its docstring describes {', '.join(unknown)}, which it does not have")
    lines, nested = [*_summary(cls)], []
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, hint in hints.items():
        key = f"{prefix}.{name}"
        if dataclasses.is_dataclass(hint):
            nested += ["", f"### `{key}`", "", *_section(key, hint, values[name])]
            continue
        meaning = MEANINGS.get(key) or meanings.get(name) or _enum_doc(hint)
        if not meaning:
            raise UserError(f"{key}: has no meaning; add it to the Attributes of {cls.__name__}, or as a string below the field")
        lines.append(f"| `{key}` | {_type(hint)} | `{_default(values[name])}` | {_cell(meaning)}{_choices(hint)} |")
    return lines + nested


def _summary(cls: type) -> list[str]:
    doc = inspect.getdoc(cls) or ""
    text = doc.split("Attributes:")[0].strip()
    # A dataclass without a docstring of its own gets its signature as one.
    return [] if not text or text.startswith(f"{cls.__name__}(") else [" ".join(text.split()), ""]


def meanings_of(cls: type) -> dict[str, str]:
    """Field → meaning, from `Attributes:` (several names may share a line: `a, b: …`) and from strings below fields."""
    found: dict[str, str] = {}
    doc = inspect.getdoc(cls) or ""
    if "Attributes:" in doc:
        block = textwrap.dedent(doc.split("Attributes:", 1)[1].split("\n\n")[0])
        for entry in re.split(r"\n(?=\S)", block.strip("\n")):
            names, _, text = " ".join(entry.split()).partition(": ")
            # `a, b: …` and `dir: …; sub: …` both occur; only names of fields open an entry.
            for name in re.split(r",\s*", names):
                found[name] = text
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    for field, below in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _enum_meanings(cls: type[enum.Enum]) -> dict[str, str]:
    """Member → the comment behind it."""
    return dict(re.findall(r"^\s+(\w+) = .*?#\s*(.+)$", inspect.getsource(cls), flags=re.MULTILINE))


def _enum_doc(hint: object) -> str:
    return " ".join((vars(hint).get("__doc__") or "").split()) if isinstance(hint, type) and issubclass(hint, enum.Enum) else ""


def _choices(hint: object) -> str:
    if not (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return ""
    comments = _enum_meanings(hint)
    listed = "; ".join(f"`{m.name}`" + (f": {comments[m.name]}" if m.name in comments else "") for m in hint)
    return f" One of {listed}."


def _type(hint: object) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _type(arg) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {_type(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "dict of " + " → ".join(_type(arg) for arg in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "name"
    return {int: "int", float: "float", str: "text", bool: "bool"}[hint]


def _default(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_default, value)) + "]"
    if isinstance(value, str):
        return value or '""'
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    text = text.strip().rstrip(".")
    return (text[:1].upper() + text[1:]).replace("|", "\\|") + "."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
