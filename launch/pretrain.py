"""Pre-train a model of the Kimi-K3 family.

    deepspeed launch/pretrain.py                                   the default run, a few minutes on a laptop
    deepspeed --num_gpus 8 launch/pretrain.py model=k3_0p4b        data-parallel over eight GPUs
    torchrun --nproc-per-node 2 launch/pretrain.py optim.lr=2e-3   any launcher: torchrun, srun, mpirun
    python launch/pretrain.py experiment=balancing_sign            one process
    python launch/pretrain.py debug=smoke model=k3_0p4b            any run, made two steps long
    python launch/pretrain.py --cfg job stage=cooldown_256k        print the configuration, run nothing

What follows the flags are overrides `key=value` (a list is key=[a,b]) or `group=file`; later wins. A run can be
started again with the same command: it resumes from run.dir. Ctrl-C finishes the step, saves and stops.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path


def interrupted(signum=None, frame=None) -> None:
    """Ctrl-C while libraries load: one line on rank 0 and out, at once.

    Not by an exception: inside an import some library's bare `except` swallows it, or it surfaces as a traceback. Later the
    trainer has a handler of its own, which saves first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"megamoe: interrupted before the first step; nothing was lost, start the same command again\n")
    for note in _to_remove:
        note.unlink(missing_ok=True)
    os._exit(130)


_to_remove: list[Path] = []  # what `interrupted` takes along, since os._exit runs no exit handlers
if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)

# As a script this folder is on the path, where `schema` would shadow packages of that name: put the checkout there.
_ROOT = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__" and sys.path and Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    sys.path[0] = _ROOT

from launch import environment  # noqa: E402
from megamoe.utils.errors import RunFailed, UserError  # noqa: E402
from megamoe.utils.redact import redact, redact_text  # noqa: E402

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# A run that was asked to stop ends with 0 like one that is done, so that launchers do not report a failure. Who must tell the two
# apart (launch/slurm/pretrain.sbatch) names a file in this variable; rank 0 writes why it stopped into it.
STOP_NOTE = "MEGAMOE_STOP_NOTE"

# Ranks stay this long after a user error. Launchers end the whole run as soon as one rank is gone: rank 0 must have had
# the time to say why, and the others to find the same mistake and exit with the same code.
GRACE_S = 1.0


def main(argv: list[str], environ=os.environ) -> int:
    """Run, and return the exit code. No torch import before the configuration has been checked."""
    rank, world_size = 0, 1
    hold_sigterm(True)
    try:
        launch = environment.read_launch(environ)
        rank, world_size = launch.rank, launch.world_size
        flags, overrides = parse(argv)
        if flags.help:
            if rank == 0:
                print(help_text())
            return 0
        from launch import schema

        config = schema.compose(overrides)
        if flags.cfg:
            if rank == 0:
                print(config_text(overrides, config, resolve=flags.resolve), end="")
            return 0
        config.validate(launch.world_size)
        note = environment.export(launch, environ, ranks_per_device=config.parallel.ranks_per_device)
        if note:
            _to_remove.append(note)
        hold_sigterm(False)
        environment.choose_accelerator(config.train.device.name, environ)
    except UserError as error:
        return complain(error, rank, world_size)

    try:
        from megamoe.train.run import pretrain

        code = pretrain(config, redact(schema.to_dict(config)))
        if rank == 0 and environ.get(STOP_NOTE):
            leave_stop_note(config.run.dir, Path(environ[STOP_NOTE]))
        return code
    except UserError as error:
        return complain(error, rank, world_size, only_here=True)
    except RunFailed as error:
        if error.speaks:
            print(f"megamoe: rank {rank}: {redact_text(str(error))}; resume from the last checkpoint with: {environment.same_command(launch, argv)}", file=sys.stderr, flush=True)
        # The launcher ends the run as soon as one rank is gone: the one that speaks must have had the time to.
        hold_sigterm(True)
        time.sleep(0 if error.speaks else GRACE_S)
        return EXIT_FAILED
    except KeyboardInterrupt:
        if rank == 0:
            print(f"megamoe: interrupted at once, nothing saved since the last checkpoint; resume with: {environment.same_command(launch, argv)}", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def leave_stop_note(run_dir: str, note: Path) -> None:
    """Write why this run stopped early (`SIGTERM`, `SIGINT`, `train.max_minutes=…`); nothing when it reached its last step."""
    from megamoe.monitor.metrics import read_metrics

    if reason := read_metrics(run_dir).summary.get("stopped"):
        note.write_text(f"{reason}\n")


def hold_sigterm(held: bool) -> None:
    """Let SIGTERM wait while the configuration is checked: a launcher sends it to every rank as soon as the first one has
    found the mistake, and each shall exit by itself, with the same code. Released, a waiting one takes effect."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, {signal.SIGTERM})


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into our flags and Hydra overrides, in any order.

    Raises:
        UserError: an unknown flag, a flag without its value, or --multirun.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job",))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    # The deepspeed launcher appends --local_rank=N; LOCAL_RANK is in the environment as well and is what is read.
    parser.add_argument("--local_rank", "--local-rank", type=int)
    flags, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        raise UserError(f"{unknown[0].partition('=')[0]}: unknown flag; flags are --help, --cfg job, --resolve, and settings are key=value")
    if flags.multirun:
        raise UserError("--multirun: runs share one process group, which a second job cannot set up again; start one command per run")
    return flags, rest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"command line: {message}; see --help")


def help_text() -> str:
    """The page of --help: the examples above, every group with its files, and the flags. Reads folders, imports little."""
    from launch.schema import CONF_DIR, default_choices, groups

    defaults = default_choices()
    lines = [(__doc__ or "").strip(), "", "groups (the default has a *):"]
    width = max(map(len, groups()))
    for name, options in groups().items():
        marked = [f"{option}*" if option == defaults[name] else option for option in options]
        lines += _wrap(f"  {name:<{width}} = ", marked)
    lines += [
        "",
        "flags:",
        "  --help            this page",
        "  --cfg job         print the composed and checked configuration, run nothing; --resolve fills in ${...}",
        "",
        f"Every key with its meaning and default: docs/config.md. Files of the groups: {os.path.relpath(CONF_DIR)}/.",
        "Keys of W&B and other secrets come from the environment only (WANDB_API_KEY).",
    ]
    return "\n".join(lines)


def _wrap(head: str, words: list[str], width: int = 110) -> list[str]:
    lines = [head]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append(" " * len(head))
        lines[-1] += word + "  "
    return [line.rstrip() for line in lines]


def config_text(overrides: list[str], config, *, resolve: bool) -> str:
    """The configuration as YAML, secrets redacted; interpolations stay as written unless `resolve`."""
    import yaml
    from omegaconf import OmegaConf

    from launch import schema
    from megamoe.utils.plain import to_plain

    tree = schema.to_dict(config) if resolve else to_plain(OmegaConf.to_container(schema.compose_tree(overrides), resolve=False))
    return yaml.safe_dump(redact(tree), sort_keys=False, allow_unicode=True)


def complain(error: UserError, rank: int, world_size: int, *, only_here: bool = False) -> int:
    """Say what the user can mend in one line, on rank 0, and return the exit code for every rank.

    Every rank finds a mistake in the configuration by itself, before any process group exists, and one line is enough.
    A trouble `only_here` may have struck this rank alone (its disk, its GPU): then it says so itself, after the wait,
    unless the launcher has ended the run because rank 0 said the same.
    """
    if rank == 0:
        print(f"megamoe: {redact_text(str(error))}", file=sys.stderr, flush=True)
    if world_size > 1:
        hold_sigterm(True)
        time.sleep(GRACE_S)
    if rank != 0 and only_here:
        print(f"megamoe: rank {rank}: {redact_text(str(error))}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
