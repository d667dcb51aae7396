"""A run starts from another run's weights, on any layout, and fine-tunes on conversations.

Why it matters: a fine-tuning that starts from half-loaded weights, a shifted slice or another tokenizer trains without an
error. Every rank's part is compared with the stored tensor, and the real `pretrain` runs on one rank and on four. Not covered:
what fine-tuning does to a model (VERIFICATION.md), S3 (the reader's own tests).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe.checkpoint.reader import open_checkpoint
from megamoe.checkpoint.writer import write_checkpoint
from megamoe.data.tokenizer import train_tokenizer
from megamoe.model.params import logical_name
from megamoe.model.transformer import Transformer
from megamoe.monitor.metrics import read_metrics
from megamoe.parallel.config import ParallelConfig
from megamoe.parallel.mesh import Axis, Mesh, rank_grids
from megamoe.parallel.plan import build_stage
from megamoe.testing.pool import RankPool
from megamoe.testing.proof import small_model
from megamoe.testing.small import SMALL_MODEL
from megamoe.train.initial import check_weights, load_initial, open_initial
from megamoe.utils.errors import UserError

MODEL = small_model(tie_embeddings=True)


def whole_state(model, dtype=torch.bfloat16, seed=3) -> dict[str, torch.Tensor]:
    """Every tensor of a model by its name in a checkpoint, all values different."""
    with torch.device("meta"):
        shapes = {"model/" + logical_name(path): t.shape for path, t in Transformer(model).state_dict().items()}
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(torch.float32 if name.endswith(("bias", "A_log")) else dtype) for name, shape in shapes.items()}


def mesh_of(config: ParallelConfig, world: int, me: int) -> Mesh:
    """Rank `me`'s view of a layout, without a process group."""
    axes = {}
    for name, rows in rank_grids(config, world).items():
        row = next(r for r in ([int(x) for x in row] for row in rows) if me in r)
        axes[name] = Axis(len(row), row.index(me), tuple(row))
    return Mesh(**axes)


@pytest.mark.parametrize("layout, world", [(dict(), 1), (dict(pp=2, tp=2, ep=2), 4), (dict(pp=2, vpp=2, cp=2, tp=2, ep=4), 8)], ids=str)
def test_every_rank_gets_its_part_of_every_tensor(tmp_path, layout, world):
    state = whole_state(MODEL)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, 7, state.items(), {}))
    check_weights(MODEL, checkpoint)
    covered: dict[str, torch.Tensor] = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in state.items()}
    parallel = ParallelConfig(**layout)
    for me in range(world):
        stage = build_stage(MODEL, parallel, mesh_of(parallel, world, me), device="cpu")
        for t in (*stage.parameters(), *stage.buffers()):
            t.data.fill_(7)
        num_bytes = load_initial(stage, checkpoint)
        assert num_bytes < sum(t.numel() * t.element_size() for t in state.values()) or world == 1, "a rank reads only what it holds"
        parameters = dict(stage.named_parameters())
        for path, here in stage.state_dict().items():
            info = parameters[path].megamoe if path in parameters else None
            name = "model/" + (info.name if info else logical_name(path))
            box = tuple(slice(o, o + n) for o, n in zip(info.offset if info else (0,) * here.dim(), here.shape))
            assert torch.equal(here, state[name][box].to(here.dtype)), (me, name)
            covered[name][box] = True
    assert all(c.all() for c in covered.values())


def refused(tmp_path, state=None, model=MODEL, location=None) -> str:
    if state is not None:
        location = write_checkpoint(tmp_path, 1, state.items(), {})
    with pytest.raises(UserError) as error:
        check_weights(model, open_initial(str(location)))
    assert str(error.value).startswith("run.init_from=") and "\n" not in str(error.value), error.value
    return str(error.value)


def test_another_model_is_refused_before_a_tensor_is_read(tmp_path):
    state = whole_state(MODEL)
    norm = "model/model.norm.weight"
    assert "lacks model/lm_head.weight; it is of another model" in refused(tmp_path / "a", state, replace(MODEL, tie_embeddings=False))
    fewer = {k: v for k, v in state.items() if "layers.4." not in k}
    assert "lacks model/model.layers.4.block_sparse_moe.experts.w1 and 24 other tensors" in refused(tmp_path / "b", fewer)
    assert f"has more than the model: {norm}x" in refused(tmp_path / "c", state | {norm + "x": torch.zeros(2)})
    assert "of shape [17], this run of [16]" in refused(tmp_path / "d", state | {norm: torch.zeros(17)})
    assert "in I32, not bf16" in refused(tmp_path / "e", state | {norm: torch.zeros(16, dtype=torch.int32)})
    assert "holds no weights" in refused(tmp_path / "f", {"hf/x": torch.zeros(1)})


def test_what_is_no_finished_checkpoint_is_refused(tmp_path):
    assert "does not exist" in refused(tmp_path, location=tmp_path / "nothing")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "holds no committed checkpoint" in refused(tmp_path, location=tmp_path / "run")
    place = Path(write_checkpoint(tmp_path / "half", 3, whole_state(MODEL).items(), {}))
    (place / "commit.json").unlink()
    assert "holds no commit.json" in refused(tmp_path, location=place)
    assert "holds no committed checkpoint" in refused(tmp_path, location=place.parent)
    old = tmp_path / "old/checkpoints/step_00000002"
    old.mkdir(parents=True)
    (old / "state.json").write_text("{}")
    assert "old format version 1" in refused(tmp_path, location=tmp_path / "old")
    assert "old format version 1" in refused(tmp_path, location=old)


def test_a_store_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    for key, value in {"AWS_ENDPOINT": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(key, value)
    assert "cannot be read" in refused(tmp_path, location="s3://bucket/base")


def test_a_damaged_part_is_found_while_loading(tmp_path):
    place = Path(write_checkpoint(tmp_path, 3, whole_state(MODEL).items(), {}))
    file = next(place.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    stage = build_stage(MODEL, ParallelConfig(), Mesh(), device="cpu")
    with pytest.raises(UserError, match=r"^run.init_from=.*does not match its recorded hash"):
        load_initial(stage, open_initial(str(place)))


# ---- the whole path


TALK = ("what is a heap", "a heap is a tree that keeps the smallest item first", "how do I sort", "call sorted on any list of items that compare")


def small_sft(folder: Path, **values) -> list[str]:
    """Overrides of a small stage=sft run; keys of `values` use `__` for the dot."""
    overrides = [
        *SMALL_MODEL, "model.moe.expert_size=32", "model.moe.latent=32", "stage=sft", "data=chat", f"data.paths=[{folder / 'talk.jsonl'}]", f"data.cache_dir={folder / 'cache'}",
        "data.holdout_fraction=0.3", "data.num_workers=1", "train.seq_len=128", "train.global_batch_tokens=512", "train.micro_batch_tokens=128", "train.num_steps=4",
        "train.precision=fp32", "train.device=cpu", "train.eval_interval_steps=0", "train.eval_windows=4", "optim.lr=3e-3", "optim.warmup_fraction=0", "optim.schedule=constant", "monitor.wandb=off",
        "monitor.log_interval_steps=1", "engine=plain", f"run.init_from={folder / 'base'}",
    ]  # fmt: skip
    return overrides + [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


def _run(overrides: list[str], world: int) -> int:
    from launch.schema import compose, to_dict
    from megamoe.train.run import pretrain

    config = compose(overrides)
    config.validate(world)
    return pretrain(config, to_dict(config))


def _refusal(overrides: list[str]) -> str:
    try:
        _run(overrides, 1)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, and a base run: a checkpoint of weights alone, as a converter writes it, and its tokenizer."""
    from launch.schema import compose

    folder = tmp_path_factory.mktemp("sft")
    rows = [{"messages": [{"role": "user", "content": f"{TALK[i % 2 * 2]} {i}"}, {"role": "assistant", "content": f"{TALK[i % 2 * 2 + 1]} {i}"}]} for i in range(120)]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "base").mkdir()
    train_tokenizer([*TALK] * 5, 400, folder / "base/run.tokenizer.json")
    config = compose(small_sft(folder))
    state = {k: v * (0.3 if k.endswith("bias") else 0.05) if v.dim() > 1 or k.endswith("bias") else v.abs() for k, v in whole_state(config.model, torch.float32).items()}
    write_checkpoint(folder / "base/checkpoints", 9, state.items(), {})
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """float64, where rounding to MXFP4 is safe across layouts: noise of 1e-16 meets no border between two codes."""
    exact = {"train__precision": "fp64", "train__num_steps": 3}
    with RankPool(4) as pool:
        pool.run(_run, 1, small_sft(folder, **exact, run__dir=folder / "one"), 1, timeout_s=200)
        pool.run(_run, 4, small_sft(folder, **exact, run__dir=folder / "four", parallel__pp=2, parallel__tp=2, parallel__ep=2), 4, timeout_s=200)
        pool.run(_run, 1, small_sft(folder, run__dir=folder / "learns", train__num_steps=8, train__eval_interval_steps=4), 1, timeout_s=200)
    return folder


@pytest.fixture(scope="module")
def later(runs):
    """What other processes do after those runs, by name: "" or the line that refused."""
    other = runs / "other"
    other.mkdir()
    source = open_initial(str(runs / "base"))
    write_checkpoint(other / "checkpoints", 1, ((name, source.read(name)) for name in source.names()), {"identity": {"tokenizer": "another"}})
    gone = dict(train__precision="fp64", train__num_steps=4, run__init_from=runs / "gone")
    cases = {
        "continued": small_sft(runs, **gone, run__dir=runs / "one"),
        "base gone": small_sft(runs, **gone, run__dir=runs / "fresh"),
        "no tokenizer": small_sft(runs, run__dir=runs / "fresh", run__init_from=other),
        "other tokenizer": small_sft(runs, run__dir=runs / "fresh", run__init_from=other, data__tokenizer=runs / "base"),
    }
    with RankPool(1) as pool:
        return {name: pool.run(_refusal, 1, overrides, timeout_s=200)[0] for name, overrides in cases.items()}


def rows_of(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in read_metrics(run).rows if "loss" in row}


def test_a_layout_fine_tunes_as_one_rank_does(runs):
    one, four = rows_of(runs / "one"), rows_of(runs / "four")
    assert four.keys() == {1, 2, 3}
    for step, row in four.items():
        for key in ("loss", "grad_norm", "router_bias_max"):
            assert row[key] == pytest.approx(one[step][key], rel=1e-9), (step, key)


def test_the_first_loss_is_the_base_models(runs):
    """By hand: the stored weights in a plain model, on the step's own windows, assistant's tokens only."""
    from launch.schema import compose
    from megamoe.data.batch import collate
    from megamoe.data.dataset import build_datasets

    losses = {}
    for qat in ("mxfp4", "off"):
        config = compose(small_sft(runs, model__moe__qat=f'"{qat}"'))
        train, _ = build_datasets(replace(config.data, tokenizer=str(runs / "base")), seq_len=128, vocab_size=config.model.vocab_size, seed=config.train.seed)
        model, checkpoint = Transformer(config.model), open_initial(str(runs / "base"))
        model.load_state_dict({path: checkpoint.read("model/" + logical_name(path)) for path in model.state_dict()})
        model.double().eval()
        total, count, tokens = 0.0, 0, 0
        for i in range(4):
            batch = collate([train.window(i)])
            with torch.no_grad():
                hidden = model(batch.tokens_T, cu_seqlens=batch.cu_seqlens, token_mask_T=batch.labels_T != -100)
                total += model.token_losses(hidden, batch.labels_T).sum().item()
            count, tokens = count + int((batch.labels_T != -100).sum()), tokens + batch.tokens_T.numel()
        assert 0 < count < 0.8 * tokens, "the user's part carries no loss"
        losses[qat] = total / count
    first = rows_of(runs / "one")[1]["loss"]
    assert first == pytest.approx(losses["mxfp4"], rel=1e-9)
    assert abs(first - losses["off"]) > 1e-6, "the experts compute with rounded weights"


def test_quantised_fine_tuning_learns_the_answers(runs):
    rows = rows_of(runs / "learns")
    assert rows[8]["eval_loss"] < rows[4]["eval_loss"] < rows[1]["loss"], rows


def test_a_run_with_checkpoints_of_its_own_continues_them(runs, later):
    """The base may be gone by then: its tokenizer is in the run's folder."""
    assert later["continued"] == "" and rows_of(runs / "one").keys() == {1, 2, 3, 4}
    assert later["base gone"].startswith("run.init_from=") and "does not exist" in later["base gone"]


def test_another_tokenizer_than_the_bases_is_refused(runs, later):
    assert "data.tokenizer=auto" in later["no tokenizer"] and "comes without a tokenizer" in later["no tokenizer"]
    assert later["other tokenizer"].startswith("run.init_from=") and "was trained with another tokenizer" in later["other tokenizer"]
    assert not (runs / "fresh/checkpoints").exists()
