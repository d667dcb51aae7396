"""From a checked `Config` to a finished run: process group, mesh, data, model, optimizer, resume, loop, pictures.

`launch/pretrain.py` calls `pretrain` on every rank and turns a `UserError` into one line and exit code 2.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megamoe.checkpoint.format import MODEL
from megamoe.checkpoint.objects import Objects, StoreError
from megamoe.checkpoint.reader import Checkpoint, committed, open_checkpoint, refuse_first_form
from megamoe.checkpoint.saver import Saver
from megamoe.data.baselines import reference_bits_per_byte
from megamoe.data.dataset import WindowDataset, build_datasets
from megamoe.model.flops import count_parameters
from megamoe.model.init import init_parameters
from megamoe.model.params import logical_name
from megamoe.model.transformer import Transformer
from megamoe.monitor import FirstScreen, Monitor
from megamoe.monitor.plot import plot_run
from megamoe.ops.registry import status
from megamoe.optim.optimizer import build_optimizer
from megamoe.parallel.agree import on_every_rank, on_first_rank, same_everywhere
from megamoe.parallel.distributed import pick_device, process_group
from megamoe.parallel.mesh import Mesh, build_mesh
from megamoe.parallel.offload import ActivationOffload
from megamoe.parallel.pipeline import Pipeline
from megamoe.parallel.plan import build_stage
from megamoe.parallel.stages import plan_stages
from megamoe.train.config import Config, EngineKind, Precision
from megamoe.train.initial import check_tokenizer, data_with_tokenizer, initial_checkpoint, load_initial
from megamoe.train.trainer import Progress, Trainer
from megamoe.utils.errors import UserError, check
from megamoe.utils.features import probe
from megamoe.utils.runfolder import RunFolder, register_rank, sweep_shared_memory
from megamoe.utils.signals import StopRequest, stop_signals

log = logging.getLogger(__name__)

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32, Precision.fp64: torch.float64}


def pretrain(config: Config, resolved: dict) -> int:
    """Run one configuration on this rank and return its exit code (0: finished, or stopped politely and saved).

    Args:
        config: checked; the same on every rank (compared here).
        resolved: the configuration as plain data with secrets redacted: saved in the run folder and compared across ranks.

    Raises:
        UserError: the same text on every rank; nothing half-written is left.
    """
    device = pick_device(config.train.device.value)
    if device.type == "cpu":
        # Products of decays run into denormals, on which a CPU is a hundred times slower. Before any worker thread starts: it inherits the mode.
        # numpy looks at its smallest numbers when it is first asked, and warns about this mode: ask now.
        np.finfo(np.float32), np.finfo(np.float64)
        torch.set_flush_denormal(True)
    deepspeed = config.engine.kind is EngineKind.deepspeed
    with stop_signals() as stop, process_group(device, config.parallel.timeout_s, deepspeed=deepspeed):
        same_everywhere(resolved)
        mesh = build_mesh(config.parallel)
        with _run_folder(config, mesh, resolved) as (run_dir, run_id), _out_of_memory(config, device):
            return _train(config, resolved, mesh, device, run_dir, run_id, stop, deepspeed=deepspeed)


def _train(config: Config, resolved: dict, mesh: Mesh, device: torch.device, run_dir: Path, run_id: str, stop: StopRequest, *, deepspeed: bool) -> int:
    place = checkpoint_place(config)
    resume_from = on_first_rank(mesh, lambda: _resume_from(config, place))
    checkpoint = on_every_rank(mesh, lambda: open_checkpoint(resume_from)) if resume_from else None
    initial = initial_checkpoint(config, mesh, resumes=bool(resume_from))
    train, heldout = on_every_rank(mesh, lambda: _datasets(config))
    identity = train.identity()
    if initial:
        on_first_rank(mesh, lambda: check_tokenizer(config, initial, identity["tokenizer"]))
    if checkpoint:
        on_first_rank(mesh, lambda: check_same_run(config, checkpoint, identity))

    torch.manual_seed(config.train.seed)
    model = build_model(config, mesh, device)
    if initial:
        # Before the optimizer: its fp32 masters are made from these weights.
        on_every_rank(mesh, lambda: load_initial(model, initial))
    optimizer = build_optimizer(model, config.optim, mesh, deepspeed=deepspeed, bucket_elements=config.engine.reduce_bucket_elements)

    offload = ActivationOffload(device, config.train.offload_min_bytes) if config.train.offload else None

    monitors: list[Monitor] = []  # rank 0's one; made under agreement, because its folder may be full

    def open_monitor() -> None:
        restored_step = checkpoint.step if checkpoint else 0
        monitors.append(Monitor(config.monitor, run_dir, resolved, run_id, restored_step=restored_step))

    on_first_rank(mesh, open_monitor)
    monitor = monitors[0] if monitors else None
    saver = Saver(place, config.checkpoint, mesh, device, run_id)
    trainer = Trainer(config, mesh, device, Pipeline(model, plan_stages(config.model, config.parallel, config.train.seq_len), mesh, offload), optimizer, train, heldout, saver, monitor, stop, {"identity": identity, "config": resolved, "run_id": run_id, "revision": code_revision()})
    if checkpoint:
        trainer.restore(checkpoint)
    on_first_rank(mesh, saver.sweep)

    notes = []
    if config.run.init_from:
        notes = [f"starts from the weights of step {initial.step:,} of {initial.location}" if initial else f"run.init_from={config.run.init_from} is not read: the run continues its own checkpoint"]

    def introduce() -> None:
        train.tokenizer.save(run_dir / "run")
        monitor.first_screen(_first_screen(config, mesh, device, train, heldout, run_dir, resume_from, trainer.progress.step, notes))
        _write_reference_lines(config, train, heldout, run_dir, monitor)

    on_first_rank(mesh, lambda: _writable_dir(run_dir, introduce))
    with trainer.watch.explained():
        summary = trainer.fit()
    if monitor:
        monitor.finish(summary | _plot(run_dir))
    return 0


def _plot(run_dir: Path) -> dict[str, str]:
    try:
        return {"plot": str(plot_run(run_dir))}
    except Exception as error:  # A picture that cannot be drawn must not fail a run whose weights are saved.
        log.warning("the plot could not be drawn (%s); try tools/plot_run.py %s", error, run_dir)
        return {}


def build_model(config: Config, mesh: Mesh, device: torch.device) -> Transformer:
    """This rank's part of the model on its device with seeded initial values, in the compute dtype (what must stay fp32 does).

    The values are the same on every layout.
    """
    model = build_stage(config.model, config.parallel, mesh, device=device, seq_len=config.train.seq_len, recompute=config.train.recompute.value)
    model.to(DTYPES[config.train.precision])
    init_parameters(model, config.model, seed=config.train.seed)
    return model


def _datasets(config: Config) -> tuple[WindowDataset, WindowDataset | None]:
    return build_datasets(data_with_tokenizer(config), seq_len=config.train.seq_len, vocab_size=config.model.vocab_size, seed=config.train.seed)


def checkpoint_place(config: Config) -> Objects:
    """Where the run's checkpoints lie."""
    return Objects(config.checkpoint.dir or Path(config.run.dir) / "checkpoints")


def code_revision() -> str:
    """git's name of the code that runs, "" outside a checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""


def _resume_from(config: Config, place: Objects) -> str | None:
    """Location of the checkpoint to continue from, checked as far as it can be without reading tensors. Rank 0 only."""
    wanted = config.run.resume
    try:
        steps = committed(place)
        if not steps:
            refuse_first_form(place)
        if wanted == "never":
            check(not steps, "run.resume", "never", f"{place.location} already holds checkpoints; use run.resume=auto to continue, or another run.dir")
            return None
        if wanted == "auto":
            return f"{place.location}/{steps[-1]}" if steps else None
        checkpoint = open_checkpoint(wanted)
    except StoreError as error:
        raise UserError(f"checkpoint.dir={place.location}: cannot be read ({error}); is the store up, and are its address and credentials right?") from None
    ours = checkpoint.objects.same_place(place)
    newer = [folder for folder in steps if folder > checkpoint.folder or folder == checkpoint.folder and not ours]
    check(not newer, "run.resume", checkpoint.location, f"is older than {', '.join(newer)} in {place.location}, which the next resume would take; choose another run.dir, or move those away")
    return checkpoint.location


def check_same_run(config: Config, checkpoint: Checkpoint, identity: dict[str, str]) -> None:
    """Refuse to continue with another model, tokenizer or blend than the checkpoint's, unless the change is named.

    Raises:
        UserError: as said, or state that is not what a training run stores.
    """
    Progress.of(checkpoint)
    check_model(config, checkpoint)
    stored = {what: checkpoint.state.get(what) for what in ("identity", "config")}
    for what, value in stored.items():
        check(isinstance(value, dict), "run.resume", checkpoint.location, f"has no usable {what}; the checkpoint is damaged, resume from another")
    for what in ("tokenizer", "order", "blend"):
        check(stored["identity"].get(what) == identity[what] or what in config.run.allow_change, "run.resume", checkpoint.location,
              f"was trained with another {what}{' of samples (train.seq_len, seed, packing)' if what == 'order' else ''}; restore it, or say run.allow_change=[{what}] if that is meant")
    for section, key, value in (("optim", "kind", config.optim.kind), ("train", "precision", config.train.precision)):
        found = stored["config"].get(section)
        before = found.get(key) if isinstance(found, dict) else None
        check(before == value.value, f"{section}.{key}", value.value, f"the checkpoint {checkpoint.location} was written with {before}; its optimizer state fits no other")


def check_model(config: Config, checkpoint: Checkpoint) -> None:
    """Compare names and shapes of all weights with the configured model's, from the manifest alone.

    Raises:
        UserError: the first that differs.
    """
    with torch.device("meta"):
        expected = {MODEL + logical_name(k): tuple(v.shape) for k, v in Transformer(config.model).state_dict().items()}
    found = {name: checkpoint.entry(name).shape for name in checkpoint.names(MODEL)}
    for name in sorted(expected.keys() | found.keys()):
        check(expected.get(name) == found.get(name), "run.resume", checkpoint.location,
              f"is a checkpoint of another model ({name}: {found.get(name)} there, {expected.get(name)} here); use its model=… or another run.dir")


@contextlib.contextmanager
def _run_folder(config: Config, mesh: Mesh, resolved: dict) -> Iterator[tuple[Path, str]]:
    """Hold the run folder (rank 0), sweep what a crash left, save the configuration once."""
    held: list[RunFolder] = []

    def take() -> str:
        folder = RunFolder(config.run.dir)
        held.append(folder)
        for pid in folder.sweep_orphans():
            log.warning("killed rank %d of an earlier start of this run, which had outlived its launcher", pid)
        if removed := sweep_shared_memory():
            log.warning("removed %d stale shared-memory files of an earlier crash", len(removed))
        return _write_run_files(folder.path, resolved)

    try:
        run_id = on_first_rank(mesh, take)
        on_every_rank(mesh, lambda: _writable(config, lambda: register_rank(config.run.dir, mesh.world.rank)))
        yield Path(config.run.dir), run_id
    finally:
        for folder in held:
            folder.release()


def _write_run_files(run_dir: Path, resolved: dict) -> str:
    """run.json (id and starts) and config.json (of the newest start); returns the run's id."""

    def write() -> str:
        file = run_dir / "run.json"
        facts = json.loads(file.read_text()) if file.is_file() else {"run_id": uuid.uuid4().hex[:8], "starts": []}
        facts["starts"].append({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pid": os.getpid()})
        for name, content in (("run.json", facts), ("config.json", resolved)):
            partial = run_dir / f".{name}.partial"
            partial.write_text(json.dumps(content, indent=1))
            os.replace(partial, run_dir / name)
        return facts["run_id"]

    return _writable_dir(run_dir, write)


def _writable(config: Config, action):
    return _writable_dir(Path(config.run.dir), action)


def _writable_dir(run_dir: Path, action):
    try:
        return action()
    except OSError as error:
        for partial in run_dir.glob(".*.partial"):
            partial.unlink(missing_ok=True)
        raise UserError(f"run.dir={run_dir}: cannot be written ({error.strerror}); free some space or choose another with run.dir=…") from None


@contextlib.contextmanager
def _out_of_memory(config: Config, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into one line: what was measured, and the three cheapest levers."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        used, reserved = torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        raise UserError(
            f"out of memory on {device}: peak {used:.1f} GiB in tensors, {reserved:.1f} reserved, of {total:.1f}; cheapest levers: "
            f"train.recompute=full (now {config.train.recompute.value}), train.micro_batch_tokens={max(config.train.seq_len, config.train.micro_batch_tokens // 2)} "
            f"(now {config.train.micro_batch_tokens}), more data-parallel ranks (ZeRO-1 shards the optimizer)"
        ) from None


def _first_screen(config: Config, mesh: Mesh, device: torch.device, train: WindowDataset, heldout: WindowDataset | None,
                  run_dir: Path, resume_from: str | None, step: int, notes: list[str]) -> FirstScreen:
    with torch.device("meta"):
        counts = count_parameters(Transformer(config.model), config.model)
    held = heldout.describe() if heldout else None
    return FirstScreen(
        model=config.model.name,
        parameters=counts.total,
        active_parameters=counts.activated,
        layout=str(mesh),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads a rank",
        precision=config.train.precision.value,
        engine=config.engine.kind.value,
        optimizer=config.optim.kind.value,
        tokens_per_step=config.train.global_batch_tokens,
        micro_batches=config.micro_batches_per_step(mesh.dp.size),
        micro_batch_tokens=config.train.micro_batch_tokens,
        num_steps=config.train.num_steps,
        seq_len=config.train.seq_len,
        data=train.summary(),
        heldout=f"{held['documents']:,} documents, {held['tokens']:,} tokens, {min(config.train.eval_windows, held['windows'])} windows evaluated" if held else "none",
        ops=status(),
        features=[feature.row() for feature in probe(device.type)],
        run_dir=str(run_dir),
        resumed=f"step {step} of {resume_from}" if resume_from else "",
        notes=notes,
    )


def _write_reference_lines(config: Config, train: WindowDataset, heldout: WindowDataset | None, run_dir: Path, monitor: Monitor) -> None:
    if heldout is None:
        return
    lines = reference_bits_per_byte(train, heldout, config.data.cache_path())
    (run_dir / "baselines.json").write_text(json.dumps(lines, indent=1))
    monitor.event("reference", ", ".join(f"{k} {v:.3f}" for k, v in lines.items()) + " bits/byte on held-out text")
