"""Start a new run from the weights of a checkpoint: `run.init_from`, the bridge from pre-training to post-training.

    weights and router biases    the checkpoint's, cast to this run's dtype, before the optimizer is built: its fp32 masters
                                 are made from them
    everything else              fresh: step 0, optimizer state, data order, schedule

Any checkpoint that has `model/…` serves, on any layout: a training run's or a converter's. All that can be compared is compared
before a tensor is read: names, shapes, tokenizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megamoe.checkpoint.boxes import Box
from megamoe.checkpoint.format import MODEL
from megamoe.checkpoint.objects import StoreError
from megamoe.checkpoint.reader import Checkpoint, open_checkpoint
from megamoe.data.config import DataConfig
from megamoe.model.config import ModelConfig
from megamoe.model.params import logical_name
from megamoe.model.transformer import Transformer
from megamoe.parallel.agree import on_every_rank, on_first_rank
from megamoe.parallel.mesh import Mesh
from megamoe.train.config import Config
from megamoe.utils.errors import UserError, check

KEY = "run.init_from"
# Host memory that reading takes at once; a single larger tensor is still read whole.
READ_BYTES = 256 << 20
TOKENIZERS = ("tokenizer.json", "tiktoken.model", "*.tiktoken", "*.tokenizer.json")


def open_initial(location: str) -> Checkpoint:
    """The checkpoint that `run.init_from` names: a run folder, a place that holds checkpoints (then the newest), or one of them.

    Raises:
        UserError: there is none, it was not finished, it is damaged, foreign or of another format version, or the store does not answer.
    """
    path = _local(location)
    if path is not None:
        check(path.is_dir(), KEY, location, "does not exist; name a run folder, its checkpoints, one of them, or s3://bucket/prefix")
        if not path.name.startswith("step_") and (path / "checkpoints").is_dir():
            path = path / "checkpoints"
        if not path.name.startswith("step_") and not any(path.glob("step_*/commit.json")) and any(path.glob("step_*/state.json")):
            raise UserError(f"{KEY}={location}: holds checkpoints of the old format version 1 only; finish that run once more with this megamoe, or convert it")
        location = str(path)
    with _as_initial(location):
        return open_checkpoint(location)


def initial_checkpoint(config: Config, mesh: Mesh, resumes: bool) -> Checkpoint | None:
    """What `run.init_from` names, its weights compared with the configured model; None without it or in a run that resumes.

    Collective: rank 0 decides which one is the newest.

    Raises:
        UserError: on every rank; see `open_initial` and `check_weights`.
    """
    if not config.run.init_from or resumes:
        return None

    def choose() -> str:
        checkpoint = open_initial(config.run.init_from)
        check_weights(config.model, checkpoint)
        return checkpoint.location

    location = on_first_rank(mesh, choose)
    return on_every_rank(mesh, lambda: open_initial(location))


def data_with_tokenizer(config: Config) -> DataConfig:
    """The data section with the base model's tokenizer where `data.tokenizer=auto` would train another one.

    Looked for in the run folder that `run.init_from` points into, then in `run.dir`, where the first start of this run left it.

    Raises:
        UserError: neither has one.
    """
    data = config.data
    if not config.run.init_from or data.tokenizer != "auto" or data.source == "indexed":
        return data
    for folder in _run_folders(config):
        if any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
            return replace(data, tokenizer=str(folder))
    raise UserError(f"data.tokenizer=auto: {KEY}={config.run.init_from} comes without a tokenizer, and a new one would not be the model's; name it, such as data.tokenizer=<run folder or file>")


def check_weights(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare the names and shapes of a checkpoint's weights with a model's, from its manifest alone.

    Raises:
        UserError: a tensor is missing, unknown, of another shape, or holds no numbers to compute with.
    """
    expected = expected_shapes(model)
    found = {name: checkpoint.entry(name).shape for name in checkpoint.names(MODEL)}
    where, way_out = checkpoint.location, f"it is of another model than model.name={model.name}, choose its model=…"
    check(bool(found), KEY, where, "holds no weights (names model/…)")
    for names, what in ((expected.keys() - found.keys(), "lacks"), (found.keys() - expected.keys(), "has more than the model:")):
        first, *rest = sorted(names) or [""]
        check(not first, KEY, where, f"{what} {first}{f' and {len(rest)} other tensors' if rest else ''}; {way_out}")
    for name, shape in expected.items():
        check(found[name] == shape, KEY, where, f"has {name} of shape {list(found[name])}, this run of {list(shape)}; {way_out}")
        dtype = checkpoint.entry(name).torch_dtype
        check(dtype.is_floating_point and dtype.itemsize > 1, KEY, where, f"has {name} in {checkpoint.entry(name).dtype}, not bf16, fp16, fp32 or fp64; convert it first")


def check_tokenizer(config: Config, checkpoint: Checkpoint, tokenizer: str) -> None:
    """Refuse another tokenizer than the weights were trained with, where the checkpoint says which.

    Args:
        tokenizer: fingerprint of this run's.
    """
    identity = checkpoint.state.get("identity")
    theirs = identity.get("tokenizer") if isinstance(identity, dict) else None
    check(theirs in (None, tokenizer) or "tokenizer" in config.run.allow_change, KEY, checkpoint.location,
          f"was trained with another tokenizer than data.tokenizer={config.data.tokenizer}; name its own, such as data.tokenizer=<its run folder>, or say run.allow_change=[tokenizer] if that is meant")


def expected_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensor name in a checkpoint -> shape, of every weight and saved buffer of a model."""
    with torch.device("meta"):
        whole = Transformer(model)
    return {MODEL + logical_name(path): tuple(t.shape) for path, t in whole.state_dict().items()}


@torch.no_grad()
def load_initial(stage: nn.Module, checkpoint: Checkpoint) -> int:
    """Fill this rank's part of the model; returns the bytes read. Not collective: each rank reads just the boxes it holds.

    Args:
        stage: with its parameters' records in place (`parallel.plan.build_stage`), in the compute dtype, before the optimizer
            has seen it.
        checkpoint: one that `check_weights` has passed.

    Raises:
        UserError: a file is missing or not what was written. What was filled before stays: end the run.
    """
    parameters = dict(stage.named_parameters())
    waiting: list[tuple[torch.Tensor, tuple[str, Box]]] = []
    waiting_bytes = total = 0
    tensors = list(stage.state_dict(keep_vars=True).items())
    for number, (path, here) in enumerate(tensors, start=1):
        info = parameters[path].megamoe if path in parameters else None
        name, offset = (info.name, info.offset) if info else (logical_name(path), (0,) * here.dim())
        waiting.append((here, (MODEL + name, (tuple(offset), tuple(here.shape)))))
        waiting_bytes += here.numel() * checkpoint.entry(MODEL + name).torch_dtype.itemsize
        if waiting_bytes < READ_BYTES and number < len(tensors):
            continue
        with _as_initial(checkpoint.location):
            values = checkpoint.read_boxes([box for _, box in waiting])
        for (target, _), value in zip(waiting, values, strict=True):
            target.data.copy_(value)
        total += waiting_bytes
        waiting, waiting_bytes = [], 0
    return total


def _local(location: str) -> Path | None:
    scheme, separator, rest = location.partition("://")
    if separator and scheme != "file":
        return None
    return Path(rest if separator else location).expanduser()


def _run_folders(config: Config) -> Iterator[Path]:
    path = _local(config.run.init_from)
    if path is not None:
        yield from (path, path.parent, path.parent.parent)
    yield Path(config.run.dir)


@contextlib.contextmanager
def _as_initial(location: str) -> Iterator[None]:
    """The reader's errors speak of a resume: here they name this key. A store that does not answer is the user's to mend too."""
    try:
        yield
    except UserError as error:
        text = str(error).replace("run.resume=", f"{KEY}=", 1).replace("resume from another", "start from another")
        raise UserError(text) from None
    except StoreError as error:
        raise UserError(f"{KEY}={location}: cannot be read ({error}); is the store up, and are its address and credentials right?") from None
