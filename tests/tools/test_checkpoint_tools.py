"""What the checkpoint tools say is so: whole is whole, every fault is named, a re-laid checkpoint is read without waste.

Why: people run these on what cannot be trained again. Each claim is checked against something the tool did not compute:
planted faults, each rank's own slices as the training plan gives them, torch's numbers. Not covered: s3, terabytes.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from launch.schema import compose
from megamoe.checkpoint.boxes import intersect
from megamoe.checkpoint.format import DTYPES, MODEL
from megamoe.checkpoint.hf.exporting import export_release
from megamoe.checkpoint.hf.files import INDEX, SafetensorsFolder
from megamoe.checkpoint.hf.names import Names, release_of
from megamoe.checkpoint.offline.relay import mesh_of, smallest_world
from megamoe.checkpoint.reader import open_checkpoint
from megamoe.checkpoint.writer import write_checkpoint
from megamoe.parallel.plan import build_stage
from megamoe.utils.plain import to_plain
from tools import convert_checkpoint, diff_checkpoints, inspect_checkpoint, shard_checkpoint, verify_checkpoint
from tools.command import run_command

TOOLS = {"convert": convert_checkpoint, "shard": shard_checkpoint, "inspect": inspect_checkpoint, "verify": verify_checkpoint, "diff": diff_checkpoints}
LAYOUT = ["parallel.tp=2", "parallel.pp=2", "parallel.ep=4"]


@pytest.fixture
def cli(capsys):
    """cli(tool, *arguments) -> exit code, stdout (parsed with --json), stderr."""

    def call(tool: str, *arguments: object):
        module = TOOLS[tool]
        code = run_command(*module.parse_args([str(a) for a in arguments]), module.work, module.show)
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in arguments and out else out, err

    return call


@pytest.fixture(scope="module")
def config():
    return compose(["model=tiny"]).model


@pytest.fixture(scope="module")
def tensors(config):
    """Random values for every tensor of a tiny run: model, AdamW's and Muon's state."""
    g = torch.Generator().manual_seed(0)
    found = {}
    for row in Names(config, release_of(config)).rows:
        if row.form == "passed":
            continue
        found[row.key] = torch.randn(row.shape, generator=g).to(DTYPES[row.dtype])
        if row.name.endswith("e_score_correction_bias"):
            continue
        for kind in ("master", "momentum") if "proj" in row.name else ("master", "exp_avg", "exp_avg_sq"):
            found[f"optim/{kind}/{row.name}"] = torch.randn(row.shape, generator=g)
    found["rng/torch.cpu"] = torch.arange(100, dtype=torch.uint8)
    return found


def write(place, tensors, config, step=3):
    state = {"config": {"model": to_plain(config), "train": {"seed": step}}, "progress": {"step": step}}
    return write_checkpoint(place, step, tensors.items(), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tensors, config):
    place = tmp_path_factory.mktemp("saved") / "checkpoints"
    write(place, tensors, config)
    return place


def test_a_relaid_checkpoint_has_the_same_values_and_each_rank_reads_only_its_own(saved, tmp_path, cli, config):
    """Every rank of the layout in turn, with the slices that the training plan gives that rank."""
    code, facts, _ = cli("shard", "--checkpoint", saved, "--output", tmp_path / "relaid", "--workers", 1, "--json", *LAYOUT)
    assert code == 0 and facts["read_amplification_after"] == 1.0 < facts["read_amplification_before"]
    before, after = open_checkpoint(saved), open_checkpoint(tmp_path / "relaid")
    assert cli("diff", saved, tmp_path / "relaid")[0] == 0 and after.step == before.step and after.state["config"] == before.state["config"]
    whole = compose(LAYOUT)
    parallel = whole.parallel
    world = smallest_world(parallel)
    assert world == 8
    touched = {}
    for rank in range(world):
        held = read = 0
        for p in build_stage(config, parallel, mesh_of(parallel, world, rank), seq_len=whole.train.seq_len).parameters():
            entry = after.entry(MODEL + p.megamoe.name)
            parts = [part for part in entry.parts if intersect(part.box, (p.megamoe.offset, tuple(p.shape)))]
            held += math.prod(p.shape) * entry.torch_dtype.itemsize
            read += sum(part.length for part in parts)
            touched.setdefault(rank, set()).update(part.file for part in parts)
        assert read == held, rank
    # Stages share no file.
    assert not set().union(*(touched[r] for r in range(4))) & set().union(*(touched[r] for r in range(4, 8)))


def test_a_layout_or_model_that_does_not_fit_is_refused_in_one_line(saved, tmp_path, cli):
    for arguments, says in ((["parallel.tp=3"], "parallel.tp=3"), (["model=k3_0p4b"], "another model"), (["parallel.ep=5"], "parallel.ep=5")):
        code, _, err = cli("shard", "--checkpoint", saved, "--output", tmp_path / "x", *arguments)
        assert code == 2 and says in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("x/step_*"))


def test_verify_finds_every_planted_fault(tensors, config, tmp_path, cli):
    broken = dict(tensors)
    norm, moment = "model/model.norm.weight", "optim/exp_avg_sq/model.norm.weight"
    broken[norm] = broken[norm].clone()
    broken[norm][5] = math.nan
    del broken[moment]
    broken["model/model.layers.2.self_attn.q_projj.weight"] = broken.pop("model/model.layers.2.self_attn.q_proj.weight")
    write(tmp_path / "c", broken, config)
    code, facts, _ = cli("verify", tmp_path / "c", "--workers", 1, "--json")
    said = "\n".join(facts["faults"])
    assert code == 1 and f"{norm}: 1 of 128 values are NaN" in said and f"missing: {moment}" in said
    assert "missing: model/model.layers.2.self_attn.q_proj.weight (nearest there: model/model.layers.2.self_attn.q_projj.weight)" in said
    write(tmp_path / "d", tensors, config)
    assert cli("verify", tmp_path / "d", "--workers", 1)[0] == 0
    checkpoint = open_checkpoint(tmp_path / "d")
    part = checkpoint.entry("optim/master/lm_head.weight").parts[0]
    (path,) = (tmp_path / "d").rglob(part.file)
    data = bytearray(path.read_bytes())
    data[part.start + 17] ^= 4
    path.write_bytes(data)
    code, facts, _ = cli("verify", tmp_path / "d", "--workers", 1, "--json")
    assert code == 1 and [f.split(":")[0] for f in facts["faults"]] == [part.file, "optim/master/lm_head.weight at (0, 0)"]
    path.write_bytes(data[:-1])
    code, _, err = cli("verify", tmp_path / "d")
    assert code == 2 and "bytes, not the recorded" in err and err.count("\n") == 1


def test_verify_holds_a_checkpoint_to_the_model_it_is_asked_for(saved, cli):
    code, out, _ = cli("verify", saved, "--workers", 1, "model=k3_0p4b")
    assert code == 1 and "shape: model/model.embed_tokens.weight has [4096, 128], expected" in out


@pytest.fixture(scope="module")
def release(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "hf"
    export_release(saved, folder, shard_bytes=1 << 20)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_safetensors_split_and_merge_by_size(release, tmp_path, cli):
    code, facts, _ = cli("shard", "--safetensors", release, "--output", tmp_path / "small", "--shard-gb", 0.0002, "--workers", 1, "--json")
    assert code == 0 and facts["files"] > facts["files_before"] > 1
    assert cli("shard", "--safetensors", tmp_path / "small", "--output", tmp_path / "one", "--workers", 1)[0] == 0
    assert (tmp_path / "one" / "model.safetensors").is_file() and not (tmp_path / "one" / INDEX).exists()
    for folder in ("small", "one"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == "{}" and (tmp_path / folder / "config.json").read_bytes() == (release / "config.json").read_bytes()
        assert cli("diff", release, tmp_path / folder)[0] == 0
    sizes = [p.stat().st_size for p in (tmp_path / "small").glob("*.safetensors")]
    biggest = max(p.length for p in SafetensorsFolder(release).places.values())
    assert all(size < max(200_000, biggest) + 10_000 for size in sizes)


def test_verify_and_inspect_read_a_release(release, tmp_path, cli):
    assert cli("verify", release, "--workers", 1)[0] == 0
    places = SafetensorsFolder(release).places
    name = next(n for n in places if n.endswith("layers.1.block_sparse_moe.experts.3.w2.weight_scale"))
    code, facts, _ = cli("inspect", release, "--json", "--only", name.partition(".layers")[0])
    assert code == 0 and {"name": "language_model.model.layers.*.block_sparse_moe.experts.*.w2.weight_scale", "dtype": "U8", "shape": list(places[name].shape), "count": 8 * 16, "bytes": 8 * 16 * places[name].length} in facts["lines"]
    shutil.copytree(release, tmp_path / "bad")
    path = tmp_path / "bad" / places[name].file
    data = bytearray(path.read_bytes())
    data[places[name].start] = 255
    path.write_bytes(data)
    code, facts, _ = cli("verify", tmp_path / "bad", "--workers", 1, "--json")
    assert code == 1 and facts["faults"] == [f"{name}: 1 scales above 2^125, NaN or infinite in bf16"]


def test_diff_measures_what_differs(tensors, config, saved, tmp_path, cli):
    other = dict(tensors)
    changed, cast = "model/lm_head.weight", "model/model.norm.weight"
    other[changed] = other[changed].clone()
    other[changed][7, 9] += 2
    step = float((other[changed][7, 9].double() - tensors[changed][7, 9].double()).abs())
    other[cast] = other[cast].float()
    gone = other.popitem()[0]
    other["rng/torch.cuda"] = torch.zeros(3, dtype=torch.uint8)
    write(tmp_path / "other", other, config)
    code, facts, _ = cli("diff", saved, tmp_path / "other", "--json")
    assert code == 1 and (facts["only_in_first"], facts["only_in_second"]) == ([gone], ["rng/torch.cuda"])
    size = (other[changed].double() - tensors[changed].double()).norm() / tensors[changed].double().norm()
    assert facts["changed"][changed]["num_different"] == 1 and facts["changed"][changed]["max_abs"] == step and math.isclose(facts["changed"][changed]["relative_norm"], size, rel_tol=1e-12)
    assert list(facts["other_dtype_or_shape"]) == [cast] and list(facts["changed"]) == [changed] and facts["equal"] == len(tensors) - 3
    assert cli("diff", saved, tmp_path / "other", "--only", "optim/")[0] == 0
    assert cli("diff", saved, tmp_path / "other", "--only", changed, "--tolerance", 3)[0] == 0
    other[changed][7, 9] = math.nan  # one side only: no tolerance is wide enough
    write(tmp_path / "nan", other, config)
    assert cli("diff", saved, tmp_path / "nan", "--only", changed, "--tolerance", 1e30, "--json")[1]["changed"][changed]["max_abs"] == "inf"


def test_inspect_tells_norms_biases_and_config(tensors, config, saved, tmp_path, cli):
    code, facts, _ = cli("inspect", saved, "--norms", "--bias", "--only", "model/", "--json")
    lines = {line["name"]: line for line in facts["lines"]}
    stack = torch.cat([x.float().flatten() for n, x in tensors.items() if n.startswith("model/") and n.endswith("block_sparse_moe.experts.w2")])
    line = lines["model/model.layers.*.block_sparse_moe.experts.w2"]
    assert code == 0 and line["count"] == 8 and facts["step"] == 3
    assert math.isclose(line["rms"], stack.square().mean().sqrt(), rel_tol=1e-5) and line["largest"] == stack.abs().max()
    bias = "model/model.layers.4.block_sparse_moe.gate.e_score_correction_bias"
    assert len(facts["bias"]) == 8 and facts["bias"][bias]["max"] == tensors[bias].max()
    write(tmp_path / "other", tensors, config, step=4)
    _, facts, _ = cli("inspect", saved, "--config-diff", tmp_path / "other", "--json")
    assert facts["config_diff"] == [["train.seed", 3, 4]]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_help_with_an_example_and_errors_of_one_line(tool, cli, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        TOOLS[tool].parse_args(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and f"example:\n  python tools/{TOOLS[tool].__name__.rpartition('.')[2]}.py" in text and "--json" in text
    where = {"convert": ["--to-hf"], "shard": ["--output", tmp_path / "x", "--checkpoint"], "diff": [tmp_path]}.get(tool, [])
    more = ["--output", tmp_path / "y"] if tool == "convert" else []
    code, _, err = cli(tool, *where, tmp_path / "nothing", *more)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
