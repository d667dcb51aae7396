"""A run's configuration composes, or says in one line what to mend.

Why it matters: an override is the first thing a person types, and a run that starts with another value than the one
meant costs a night. Every YAML file is composed here, so none can rot unseen.
Not covered: whether the values train well, and the world size of a real launcher (tests/launch).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import schema
from launch.schema import CONF_DIR, compose, default_choices, groups, to_dict
from megamoe.train.config import Config
from megamoe.utils.errors import UserError
from megamoe.utils.plain import from_plain

# Files that only compose together with a value that they cannot know.
NEEDS = {"data=chat": ["data.paths=[/data/chats.jsonl]"], "data=indexed": ["data.paths=[/data/corpus]"], "data=text": ["data.paths=[/data/corpus.txt]"]}
EVERY_FILE = [f"{group}={name}" for group, names in groups().items() for name in names]


@pytest.mark.parametrize("choice", EVERY_FILE)
def test_every_file_composes_and_its_plain_form_comes_back_equal(choice):
    config = compose([choice, *NEEDS.get(choice, [])])
    assert isinstance(config, Config)
    assert from_plain(Config, json.loads(json.dumps(to_dict(config)))) == config


def test_every_yaml_file_belongs_to_a_group():
    known = {CONF_DIR / "config.yaml"} | {CONF_DIR / group / f"{name}.yaml" for group, names in groups().items() for name in names}
    assert set(CONF_DIR.rglob("*.yaml")) == known


@pytest.mark.parametrize(("stage", "model"), list(itertools.product(groups()["stage"], groups()["model"])))
def test_every_stage_composes_with_every_model(stage, model):
    config = compose([f"stage={stage}", f"model={model}"])
    assert config.model.name and config.train.global_batch_tokens % config.train.seq_len == 0


def test_stages_reach_their_context_length():
    lengths = {name: compose([f"stage={name}"]).train.seq_len for name in groups()["stage"]}
    assert {k: lengths[k] for k in ("pretrain_8k", "extend_64k", "cooldown_256k", "cooldown_1m")} == {
        "pretrain_8k": 8192, "extend_64k": 65536, "cooldown_256k": 262144, "cooldown_1m": 1048576,
    }


def test_the_command_line_wins_over_overlays_and_overlays_over_groups():
    assert compose(["debug=smoke"]).train.num_steps == 2
    assert compose(["debug=smoke", "train.num_steps=7"]).train.num_steps == 7
    assert compose(["train.num_steps=7", "debug=smoke"]).train.num_steps == 7
    assert compose(["experiment=balancing_sign"]).model.moe.balancing.name == "sign"
    assert compose(["stage=cooldown_256k"]).optim.lr != compose([]).optim.lr


def test_an_overlay_can_be_switched_off_and_replaced():
    assert to_dict(compose(["experiment=null"])) == to_dict(compose(["~experiment"])) == to_dict(compose([]))


def test_composition_leaves_no_state_behind():
    before = to_dict(compose([]))
    with pytest.raises(UserError):
        compose(["train.nope=1"])
    compose(["optim=sgd", "model.d_model=64"])
    assert to_dict(compose([])) == before


def test_plain_form_of_another_version_is_refused():
    plain = to_dict(compose([]))
    plain["optim"]["lrate"] = 1.0
    with pytest.raises(UserError, match=r"optim\.lrate: unknown key.*'?lr"):
        from_plain(Config, plain)
    plain = to_dict(compose([]))
    plain["optim"]["kind"] = "adam"
    with pytest.raises(UserError, match=r"optim\.kind=adam: .*adamw"):
        from_plain(Config, plain)


def test_entries_of_a_free_dict_can_be_added():
    assert compose(["data.special_tokens={eos:5}"]).data.special_tokens == {"eos": 5}
    assert compose(["+data.special_tokens.eos=5"]).data.special_tokens == {"eos": 5}


# override(s) → what the one line must hold. Each line is key, value, way out.
MISTAKES = {
    "optim.lrr=1": ["optim.lrr=1", "unknown key", "'optim.lr'"],
    "lr=1": ["lr=1", "unknown key", "'optim.lr'"],
    "train.lr=1": ["train.lr=1", "'optim.lr'"],
    "seq_len=4": ["'train.seq_len'"],
    "model.kda.lowerbound=-4": ["'model.kda.lower_bound'"],
    "train.zzzz=1": ["train.zzzz=1", "keys of train:", "seq_len"],
    "zzzz=1": ["zzzz=1", "sections: model", "groups: "],
    "modell=tiny": ["modell=tiny", "'model'"],
    "+optim.foo=1": ["optim.foo=1", "unknown key"],
    "++optim.foo=1": ["optim.foo=1", "unknown key"],
    "++optim={foo:1}": ["optim.foo", "unknown key"],
    "optim.lr.x=1": ["optim.lr.x=1", "'optim.lr'"],
    "model=tny": ["model=tny", "hydra_conf/model", "'tiny'"],
    "optim=adam": ["optim=adam", "'adamw'"],
    "optim=5": ["optim=5", "adamw, muon, sgd"],
    "optim.kind=adam": ["optim.kind=adam", "muon, adamw, sgd", "'adamw'"],
    "experiment=balancing_sing": ["'balancing_sign'"],
    "model=null": ["model=null", "tiny"],
    "train.num_steps=abc": ["train.num_steps=abc", "a whole number"],
    "train.num_steps=2.5": ["train.num_steps=2.5", "a whole number"],
    "optim.lr=fast": ["optim.lr=fast", "a number"],
    "optim.lr=null": ["optim.lr=null", "a number"],
    "optim.lr=": ["optim.lr=", "a number"],
    "model.mla.output_gate=maybe": ["model.mla.output_gate=maybe", "true or false"],
    "model.full_attn_layers=3": ["model.full_attn_layers=3", "a list of whole numbers"],
    "model.mla.q_lora_rank=x": ["model.mla.q_lora_rank=x", "a whole number, or null"],
    "train=5": ["train=5", "a section"],
    "train.precision=fp16": ["train.precision=fp16", "bf16, fp32, fp64"],
    "train.precision=float64": ["train.precision=float64", "bf16, fp32, fp64"],
    "train.seq_len=0": ["train.seq_len=0", "at least 1"],
    "train.seq_len=-8": ["train.seq_len=-8", "at least 1"],
    "train.seq_len=1000": ["train.global_batch_tokens=4096", "multiple of train.seq_len=1000", "4000 would work"],
    "optim.lr=-1e-3": ["optim.lr=-0.001", "zero or above"],
    "optim.lr=nan": ["optim.lr=nan", "finite"],
    "optim.lr=inf": ["optim.lr=inf", "finite"],
    "model.kda.lower_bound=-5.1": ["model.kda.lower_bound=-5.1", "-5"],
    "model.kda.lower_bound=0": ["model.kda.lower_bound=0.0", "< 0"],
    "model.kda.lower_bound=nan": ["model.kda.lower_bound=nan"],
    "model.moe.top_k=17": ["model.moe.top_k=17", "num_experts"],
    "model.full_attn_layers=[99]": ["model.full_attn_layers=[99]", "num_layers"],
    "train.precision=fp64": ["train.precision=fp64", "engine.kind=plain"],
    "parallel.tp=0": ["parallel.tp=0", "at least 1"],
    "data=indexed": ["data.paths"],
    "data.source=hdfs": ["data.source='hdfs'", "stdlib"],
    "optim.lr": ["optim.lr", "key=value"],
    "=3": ["=3", "key=value"],
    "model.full_attn_layers=[4,8": ["model.full_attn_layers=[4,8", "[a,b]"],
    "run.dir=a b,c": ["run.dir", "[a b,c]"],
    "optim.lr=1,2": ["optim.lr=1,2", "one value", "[1,2]"],
    "+optim.lr=1": ["optim.lr exists", "+"],
    "~optim.lr": ["~optim.lr", "cannot be removed"],
    "optim@model=sgd": ["optim@model=sgd", "optim=sgd"],
    "optim.lr=${optim.nope}": ["optim.lr=${optim.nope}", "nope"],
    "optim.lr=${oc.env:MEGAMOE_NOT_SET}": ["MEGAMOE_NOT_SET"],
    "run.allow_change=[weights]": ["run.allow_change", "tokenizer, blend, order"],
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_with_key_value_and_way_out(override):
    with pytest.raises(UserError) as caught:
        compose([override])
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    for part in MISTAKES[override]:
        assert part in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("# @package _global_\noptim:\n  lrr: 3\n", ["optim.lrr", "'optim.lr'", "hydra_conf/experiment/x.yaml"]),
        ("# @package _global_\noptim:\n  lr: fast\n", ["optim.lr=fast", "a number", "hydra_conf/experiment/x.yaml"]),
        ("# @package _global_\nmonitor:\n  wandb: off\n", ["monitor.wandb=False", '"off" in quotes']),
        ("# @package _global_\noptim: {lr: 3\n", ["hydra_conf/experiment/x.yaml line", "not valid YAML"]),
        ("# @package _global_\ndefaults:\n  - override /model: tny\n", ["model=tny", "'tiny'"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file(text, parts, tmp_path, monkeypatch):
    conf = tmp_path / "hydra_conf"
    for source in CONF_DIR.rglob("*.yaml"):
        copy = conf / source.relative_to(CONF_DIR)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    (conf / "experiment" / "x.yaml").write_text(text)
    monkeypatch.setattr(schema, "CONF_DIR", conf)
    with pytest.raises(UserError) as caught:
        compose(["experiment=x"])
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_world_size_must_fit_the_layout():
    config = compose(["parallel.dp=2", "parallel.tp=2"])
    config.validate(world_size=4)
    with pytest.raises(UserError, match="world size=6.*start 4"):
        config.validate(world_size=6)
    with pytest.raises(UserError, match="tp·pp·cp = 2 does not divide"):
        config.validate(world_size=3)
    with pytest.raises(UserError, match="global_batch_tokens=4096.*would work"):
        compose([]).validate(world_size=3)


def test_composition_imports_no_torch():
    code = "import sys; from launch.schema import compose; compose([]); sys.exit(sum(m in sys.modules for m in ('torch', 'numpy', 'deepspeed', 'wandb', 'matplotlib')))"
    root = Path(schema.__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_default_of_every_group_exists():
    for group, name in default_choices().items():
        assert name is None or name in groups()[group]
