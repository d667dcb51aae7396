#!/usr/bin/env python3
"""Prove that a run which is killed goes on as if nothing had happened, wherever the kill falls.

    python tools/prove_resume.py                                    # 20 kills at seeded random moments
    python tools/prove_resume.py --kills 5 --seed 3 --json kills.json
    python tools/prove_resume.py --ranks 2 --kills 4 parallel.tp=2  # other arguments are Hydra overrides

A small run trains 2N steps straight; another N, is killed with SIGKILL and trains N more. Then runs are killed again and again: inside
a forward, between the updates of two kinds of parameters, before, inside and after a file of a save, around the pointer that commits
it, between the two phases of a deletion. After every kill each committed checkpoint must verify to the last byte and none may be
lost. Exit code 0 only when every run ends with the losses, gradient norms and checkpoint tensors of the straight one, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Moments of a run, and up to which occurrence after a start they are drawn.
MOMENTS = {
    "before a step": 5, "between two updates": 5, "before a file": 8, "inside a file": 8, "after a file": 8,
    "before the pointer": 2, "inside the pointer": 2, "after the pointer": 2, "inside a deletion": 2,
}  # fmt: skip


class Failed(Exception):
    """The proof does not hold; one line."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="half the length of the run (default 6)")
    parser.add_argument("--kills", type=int, default=20, help="kills at random moments (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default 0)")
    parser.add_argument("--ranks", type=int, default=1, help="CPU ranks of the run (default 1)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds one start may take before it counts as hung")
    parser.add_argument("--json", type=Path, help="also write what happened to this file")
    args, overrides = parser.parse_known_args(argv)
    unknown = [o for o in overrides if o.startswith("-")]
    if unknown or args.steps < 2 or args.kills < 0 or args.ranks < 1:
        print(f"{' '.join(unknown) or '--steps, --kills, --ranks'}: unknown or out of range; see --help", file=sys.stderr)
        return 2
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(Path(folder), args, overrides)
        try:
            proof.run()
            verdict = ""
        except Failed as error:
            verdict = str(error)
    print(f"FAILED: {verdict}" if verdict else f"passed: {len(proof.kills)} kills, every run bit-equal to the straight one, in {time.monotonic() - proof.began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "ranks": args.ranks, "steps": 2 * args.steps, "failed": verdict, "kills": proof.kills}, indent=1))
    return int(bool(verdict))


class Proof:
    """Starts runs in processes that a server forks with everything imported: a start then costs a second or two."""

    def __init__(self, folder: Path, args: argparse.Namespace, overrides: list[str]):
        self.folder, self.args, self.overrides = folder, args, overrides
        self.kills: list[dict] = []
        self.began = time.monotonic()
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["deepspeed", "launch.schema", "megamoe.train.run", "megamoe.testing.reshard", "megamoe.testing.small"])

    def run(self) -> None:
        self.start("straight")
        straight = self.ask(outcome, self.folder / "straight")
        print(f"straight: {2 * self.args.steps} steps, {len(straight['tensors'])} tensors in the last checkpoint", flush=True)
        # "Before a step" counts from one: this kill falls when N steps are done.
        self.start("half", ("before a step", self.args.steps + 1))
        self.start("half")
        self.compare("half", straight)
        print(f"{self.args.steps} steps + SIGKILL + {self.args.steps} steps: bit-equal", flush=True)
        dice, chain = random.Random(self.args.seed), 0
        while len(self.kills) < self.args.kills + 1:
            name = f"chain{chain}"
            while len(self.kills) < self.args.kills + 1:
                moment = dice.choice(list(MOMENTS))
                if not self.start(name, (moment, dice.randint(1, MOMENTS[moment])), victim=dice.randrange(self.args.ranks)):
                    break  # it ended before the moment came: a whole run
            else:
                self.start(name)
            self.compare(name, straight)
            chain += 1

    def start(self, name: str, moment: tuple[str, int] | None = None, victim: int = 0) -> bool:
        """Start or continue a run; whether it was killed. After a kill what it left is checked.

        Raises:
            Failed: it ended otherwise than by the kill or with 0, or a committed checkpoint is damaged or lost.
        """
        from megamoe.parallel.distributed import free_port

        run_dir = self.folder / name
        before = self.ask(committed_steps, run_dir)
        port, log = free_port(), self.folder / f"{name}.log"
        what = (self.folder, run_dir, 2 * self.args.steps, self.overrides, log)
        ranks = [self._processes.Process(target=train, args=(rank, self.args.ranks, port, moment if rank == victim else None, *what)) for rank in range(self.args.ranks)]
        for process in ranks:
            process.start()
        # All fall with the victim; without one all end by themselves.
        ranks[victim].join(self.args.timeout)
        code = ranks[victim].exitcode
        for process in ranks:
            process.join(self.args.timeout if code == 0 else 0)
            process.kill()
            process.join()
        killed = moment is not None and code == -signal.SIGKILL
        if not killed and any(process.exitcode for process in ranks):
            raise Failed(f"{name}: a start ended with {[p.exitcode for p in ranks]}; its last lines: {' | '.join(log.read_text().splitlines()[-3:])}")
        if killed:
            after = self.ask(committed_steps, run_dir)
            if before and max(after, default=0) < max(before):
                raise Failed(f"{name}: killed {moment[0]}, step {max(before)} is gone, left are {after}")
            self.kills.append({"run": name, "moment": moment[0], "occurrence": moment[1], "rank": victim, "committed_before": before, "committed_after": after})
            print(f"kill {len(self.kills) - 1:2}  {name:8} {moment[0]:22} no. {moment[1]}  rank {victim}  committed {after}", flush=True)
        return killed

    def compare(self, name: str, straight: dict) -> None:
        found = self.ask(outcome, self.folder / name)
        for what, expected in straight.items():
            if found[what] != expected:
                differ = [key for key in expected if found[what].get(key) != expected[key]] if isinstance(expected, dict) else found[what]
                raise Failed(f"{name}: {what} differ from the straight run's, first {differ[:3]}")

    def ask(self, question, run_dir: Path):
        """The answer of a function in a process of its own: this one must stay free of threads of the store's client."""
        theirs, ours = self._processes.Pipe()
        process = self._processes.Process(target=answer, args=(theirs, question, run_dir))
        process.start()
        theirs.close()
        try:
            result = ours.recv() if ours.poll(self.args.timeout) else Failed(f"{run_dir.name}: reading its checkpoints hangs")
        except EOFError:
            result = Failed(f"{run_dir.name}: its checkpoints cannot be read")
        process.join()
        if isinstance(result, Failed):
            raise result
        return result


def answer(pipe, question, run_dir: Path) -> None:
    from megamoe.utils.errors import UserError

    try:
        pipe.send(question(run_dir))
    except UserError as error:
        pipe.send(Failed(str(error)))


def committed_steps(run_dir: Path) -> list[int]:
    """Steps of the committed checkpoints, every file of each hashed."""
    from megamoe.checkpoint.objects import Objects
    from megamoe.checkpoint.reader import committed, open_checkpoint

    place = Objects(run_dir / "checkpoints")
    found = [open_checkpoint(f"{place.location}/{folder}") for folder in committed(place)]
    for checkpoint in found:
        list(checkpoint.verify_files())
    return [checkpoint.step for checkpoint in found]


def outcome(run_dir: Path) -> dict:
    """All that must be equal at the end: rows by step, every tensor's bytes, the stored state, and which folders there are."""
    from megamoe.checkpoint.format import xxh3
    from megamoe.checkpoint.objects import Objects
    from megamoe.checkpoint.reader import open_checkpoint
    from megamoe.monitor.metrics import read_metrics

    last, place = open_checkpoint(run_dir / "checkpoints"), Objects(run_dir / "checkpoints")
    return {
        "losses": {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(run_dir).rows if "loss" in row},
        "tensors": {name: xxh3(b"".join(bytes(last.part_bytes(name, part)) for part in last.entry(name).parts)) for name in last.names()},
        "state": {key: last.state[key] for key in ("progress", "adam_step", "identity")},
        "left-overs": {folder: len(place.folders(folder)) for folder in place.folders()},
    }


def train(rank: int, world_size: int, port: int, moment: tuple[str, int] | None, folder: Path, run_dir: Path, num_steps: int, overrides: list[str], log: Path) -> None:
    """One rank of one start, its output in the log."""
    from launch.schema import compose, to_dict
    from megamoe.testing.small import small_run
    from megamoe.train.run import pretrain
    from megamoe.utils.errors import UserError

    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if moment:
        arm(*moment)
    try:
        config = compose(small_run(folder, train__num_steps=num_steps, checkpoint__interval_steps=2, run__dir=run_dir) + overrides)
        config.validate(world_size)
        code = pretrain(config, to_dict(config))
    except UserError as error:
        print(error, flush=True)
        code = 2
    sys.stdout.flush()
    # Without the handlers of a server that forked us.
    os._exit(code)


def arm(moment: str, occurrence: int) -> None:
    """Make this process kill itself at the n-th occurrence of a moment."""
    from megamoe.checkpoint import objects
    from megamoe.checkpoint.format import COMMIT
    from megamoe.optim.muon import Muon
    from megamoe.train import trainer

    left = occurrence

    def hit(what: str) -> None:
        nonlocal left
        left -= what == moment
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name: str, what: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            hit(what)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    create, delete = objects._create, objects.Objects.delete

    def noted_create(path: Path, data: bytes) -> None:
        what = "the pointer" if path.name == COMMIT else "a file"
        hit(f"before {what}")
        if moment == f"inside {what}" and left == 1:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.00000000").write_bytes(data[: len(data) // 2])
        hit(f"inside {what}")
        create(path, data)
        hit(f"after {what}")

    def noted_delete(self, names: list[str]) -> None:
        delete(self, names)
        if any(name.endswith(COMMIT) for name in names):
            hit("inside a deletion")

    before(trainer, "train_step", "before a step")
    before(Muon, "step", "between two updates")
    objects._create, objects.Objects.delete = noted_create, noted_delete


if __name__ == "__main__":
    sys.exit(main())
