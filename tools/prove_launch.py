"""Start the same small run by every launcher and compare: the same mesh, the same first losses, nothing left behind.

    python tools/prove_launch.py                          every way to start, then a killed and a hung rank; CPU, four gloo ranks
    python tools/prove_launch.py --only torchrun slurm    some of them
    python tools/prove_launch.py --commands               print what would be run, run nothing

Two "nodes" are two network namespaces with their own host names, joined by a virtual cable: what listens on one's loopback
is not seen by the other. That needs root and `ip`; without them both nodes share this machine's loopback, and the table
says so. Programs that are not installed are replaced where that is honest: `ssh` by entering the namespace, `srun` by
starting each task with the variables Slurm sets, `mpirun` by the variables of Open MPI. The table names the stand-ins.

Exit code 0 when every row passes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megamoe.testing.small import small_run  # noqa: E402

RANKS, PORT = 4, 29517
LAYOUT = ["parallel.tp=2", "parallel.pp=2"]
LAUNCHERS_VARIABLES = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC", "CROSS_")


@dataclass
class Nodes:
    """Two places to start processes, and how: a command prefix for each, and the address of the first."""

    prefixes: list[list[str]] = field(default_factory=lambda: [[], []])
    names: list[str] = field(default_factory=lambda: ["127.0.0.1", "localhost"])
    addr: str = "127.0.0.1"
    how: str = "one loopback"


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Two network namespaces `mm<pid>a` and `mm<pid>b` with one cable; removed at the end. Falls back to the loopback."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        yield Nodes()
        return
    a, b = f"mm{os.getpid()}a", f"mm{os.getpid()}b"
    steps = [
        f"ip netns add {a}", f"ip netns add {b}", f"ip link add {a} netns {a} type veth peer name {b} netns {b}",
        *(f"ip -n {ns} addr add 10.77.0.{i}/24 dev {ns}" for i, ns in ((1, a), (2, b))),
        *(f"ip -n {ns} link set {dev} up" for ns in (a, b) for dev in ("lo", ns)),
    ]  # fmt: skip
    try:
        if any(subprocess.run(step.split(), capture_output=True).returncode for step in steps):
            yield Nodes()
            return
        # Names on both nodes, as DNS gives them on a cluster: `ip netns exec` binds this file over /etc/hosts.
        for ns in (a, b):
            (etc := Path("/etc/netns") / ns).mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n")
        prefixes = []
        for ns, name in ((a, "node-a"), (b, "node-b")):
            enter = folder / f"enter-{name}"
            enter.write_text(f'#!/bin/sh\nexec ip netns exec {ns} unshare --uts sh -c \'hostname {name}; exec "$@"\' sh "$@"\n')
            enter.chmod(0o755)
            prefixes.append([str(enter)])
        yield Nodes(prefixes, ["node-a", "node-b"], "10.77.0.1", "two network namespaces")
    finally:
        for ns in (a, b):
            subprocess.run(["ip", "netns", "del", ns], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / ns, ignore_errors=True)


def stand_ins(folder: Path, nodes: Nodes) -> Path:
    """A folder for PATH: `ssh` and `srun` that start their command on one of the nodes; `pdsh` where there is none."""
    tools = folder / "bin"
    tools.mkdir()
    table = json.dumps(dict(zip(nodes.names, nodes.prefixes, strict=True)))
    programs = {
        # ssh [options] host command…: a login shell of the other side reads the words again, as real ssh does.
        "ssh": f"""
            import os, sys
            nodes, words = {table}, sys.argv[1:]
            while words[0].startswith('-'):
                words = words[2 if words[0] in ('-l', '-o', '-p') else 1:]
            command = nodes[words[0]] + ['sh', '-c', 'cd; ' + ' '.join(words[1:])]
            os.execvp(command[0], command)""",
        # srun [options] command…: two tasks on each of two nodes, with the variables of a step; a bad exit ends the others.
        "srun": f"""
            import os, subprocess, sys, time
            nodes, words = list({table}.items()), sys.argv[1:]
            while words[0].startswith('--'):
                words = words[1:]
            tasks = []
            for rank in range({RANKS}):
                name, prefix = nodes[rank // 2]
                mine = dict(SLURM_PROCID=rank, SLURM_LOCALID=rank % 2, SLURM_NODEID=rank // 2, SLURM_STEP_NUM_TASKS={RANKS}, SLURM_NTASKS={RANKS}, SLURM_STEP_NUM_NODES=2, SLURM_NNODES=2,
                            SLURM_STEP_TASKS_PER_NODE='2(x2)', SLURM_STEP_NODELIST=','.join(n for n, _ in nodes), SLURM_STEP_ID=0, SLURMD_NODENAME=name)
                tasks.append(subprocess.Popen(prefix + words, env=os.environ | {{k: str(v) for k, v in mine.items()}}))
            while any(t.poll() is None for t in tasks) and not any(t.poll() for t in tasks):
                time.sleep(0.1)
            began = time.monotonic()
            for t in tasks:
                if any(t.poll() for t in tasks) and t.poll() is None:
                    t.terminate()
            for t in tasks:
                try: t.wait(max(0.1, 30 + began - time.monotonic()))
                except subprocess.TimeoutExpired: t.kill()
            sys.exit(max(abs(t.wait()) for t in tasks))""",
    }
    if not shutil.which("pdsh"):
        programs["pdsh"] = """
            import os, subprocess, sys
            words = sys.argv[1:]
            hosts = words[words.index('-w') + 1].split(',')
            command = ' '.join(words[words.index('-w') + 2:])
            sys.exit(max(abs(p.wait()) for p in [subprocess.Popen(['ssh', h, command.replace('%n', str(i))]) for i, h in enumerate(hosts)]))"""
    import textwrap

    for name, body in programs.items():
        (tools / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(body).strip()}\n")
        (tools / name).chmod(0o755)
    for name in ("python", "torchrun", "deepspeed"):  # of this environment, also where it is not activated
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {dict(python="", torchrun="-m torch.distributed.run", deepspeed="-m deepspeed.launcher.runner")[name]} "$@"\n')
        (tools / name).chmod(0o755)
    return tools


def ways(nodes: Nodes, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """What each way is called: (what stands in for what, the commands a user types, one per node)."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in nodes.names))
    two = nodes.how
    mpi = "" if shutil.which("mpirun") else "simulated variables"
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    script = "launch/pretrain.py"
    return {
        "deepspeed": ("", [f"deepspeed --num_gpus {RANKS} {script}"]),
        "torchrun": ("", [f"torchrun --nproc-per-node {RANKS} --master-port {PORT} {script}"]),
        "mpirun": (mpi, [f"mpirun -np {RANKS} --oversubscribe{root} python {script}"]),
        "torchrun-2": (two, [f"torchrun --nnodes 2 --nproc-per-node 2 --node-rank {n} --master-addr {nodes.addr} --master-port {PORT} {script}" for n in (0, 1)]),
        "torchrun-2-c10d": (two, [f"torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id proof --rdzv-endpoint {nodes.addr}:{PORT} --local-addr {addr} {script}" for addr in (nodes.addr, nodes.addr.replace("0.1", "0.2") if "77" in nodes.addr else nodes.addr)]),
        "deepspeed-hostfile": (f"{two}; ssh enters them{'' if shutil.which('pdsh') else ', pdsh by it'}", [f"deepspeed --hostfile {hostfile} --master_addr {nodes.addr} --master_port {PORT} {script}"]),
        "deepspeed-no-ssh": (two, [f"deepspeed --hostfile {hostfile} --no_ssh --node_rank {n} --master_addr {nodes.addr} --master_port {PORT} {script}" for n in (0, 1)]),
        "slurm": (f"{two}; srun's variables", ["bash launch/slurm/pretrain.sbatch"]),
    }


def environment(tools: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS_VARIABLES)}
    return clean | {
        "PATH": f"{tools}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "4711", "MEGAMOE_DIR": str(ROOT), "PDSH_RCMD_TYPE": "ssh", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


@dataclass
class Seen:
    """What one start showed."""

    code: int
    seconds: float
    text: str
    mesh: str = ""
    losses: list[float] = field(default_factory=list)
    orphans: int = 0
    leftovers: int = 0


def start(commands: list[str], nodes: Nodes, tools: Path, overrides: list[str], run_dir: Path, *, kill: bool = False, timeout_s: float = 150, extra: dict[str, str] | None = None) -> Seen:
    """Run one command a node at the same time; with `kill`, SIGKILL the last rank once the first step is logged."""
    shm, began = set(os.listdir("/dev/shm")), time.monotonic()
    log = run_dir.parent / f"{run_dir.name}.log"
    with log.open("w") as out:
        processes = [
            subprocess.Popen([*(nodes.prefixes[i] if len(commands) > 1 else []), *shlex.split(command), *overrides], cwd=ROOT, env=environment(tools) | (extra or {}), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            for i, command in enumerate(commands)
        ]  # fmt: skip
        deadline, killed_s = began + timeout_s, 0.0
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
            if kill and not killed_s and (run_dir / "metrics.jsonl").is_file() and '"loss"' in (run_dir / "metrics.jsonl").read_text():
                os.kill(json.loads((run_dir / ".ranks" / f"{RANKS - 1}.json").read_text())["pid"], signal.SIGKILL)
                killed_s = time.monotonic()
        seconds = time.monotonic() - (killed_s or began)
        alive = _ours(run_dir)  # before anything is ended by us
        late = any(p.poll() is None for p in processes)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        for p in processes:
            p.kill() if p.poll() is None else None
    codes = [p.wait() for p in processes]
    text = log.read_text()
    mesh = re.search(r"\d+ ranks?: dense [^│|\n]*?ep \d+", text)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()] if (run_dir / "metrics.jsonl").is_file() else []
    return Seen(-1 if late else max(codes, key=abs), seconds, text, mesh[0] if mesh else "", [r["loss"] for r in rows if "loss" in r], len(alive), len(set(os.listdir("/dev/shm")) - shm))


def _ours(run_dir: Path) -> list[int]:
    """Living processes whose command line names the run folder. Ranks need a moment to be reaped after their launcher has gone."""
    for _ in range(20):
        found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if p.name != str(os.getpid()) and _names(p, f"run.dir={run_dir}")]
        if not found:
            break
        time.sleep(0.1)
    return found


def _names(process: Path, word: str) -> bool:
    try:
        return word.encode() in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of the table's first column")
    parser.add_argument("--commands", action="store_true", help="print the commands and stop")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="prove_launch_") as name, two_nodes(Path(name)) as nodes:
        return prove(Path(name), nodes, args.only, commands_only=args.commands)


def prove(folder: Path, nodes: Nodes, only: list[str], *, commands_only: bool = False) -> int:
    tools, listed = stand_ins(folder, nodes), ways(nodes, folder)
    faults = [f"{way} {fault}" for way in ("deepspeed", "torchrun", "mpirun", "torchrun-2", "deepspeed-hostfile", "slurm") for fault in ("killed", "hung")]
    wanted = [name for name in [*listed, *faults] if not only or name in only or name.split()[0] in only and len(name.split()) == 1]
    if commands_only:
        print("\n".join(f"{name:20} {command}" for name in listed if name in wanted for command in listed[name][1]))
        return 0
    print(f"nodes: {nodes.how}\n{'start':26}{'exit':>5}{'s':>6}  {'first losses':24}{'orphans':>8}{'shm':>4}  result", flush=True)
    reference: Seen | None = None
    failed = 0
    for name in wanted:
        way, _, fault = name.partition(" ")
        stand_in, commands = listed[way]
        extra = {}
        if way == "mpirun" and not shutil.which("mpirun"):
            commands = [f"{c.split(' python ')[-1]}" for c in commands for _ in range(1)]
            commands = ["python -c " + shlex.quote(_MPI_STAND_IN) + f" python {commands[0]}"]
        run_dir = folder / name.replace(" ", "-")
        values = dict(train__num_steps=2 if not fault else 400, parallel__timeout_s=60 if not fault else 8, engine="deepspeed", train__precision="fp32", run__dir=run_dir)
        if fault == "hung":
            extra["MEGAMOE_TEST_HANG"] = f"{RANKS - 1}:2"
        overrides = small_run(folder / "shared", **values) + LAYOUT
        seen = start(commands, nodes, tools, overrides, run_dir, kill=fault == "killed", extra=extra)
        reference = reference or (seen if not fault else None)
        wrong = _wrong(seen, fault, reference)
        failed += bool(wrong)
        print(f"{name:26}{seen.code:>5}{seen.seconds:>6.1f}  {' '.join(f'{x:.6f}' for x in seen.losses[:2]):24}{seen.orphans:>8}{seen.leftovers:>4}  {wrong or 'PASS'}{f'  ({stand_in})' if stand_in else ''}", flush=True)
        for line in (x for x in seen.text.splitlines() if fault and x.startswith("megamoe: rank")):
            print("    " + line.partition("; resume from")[0][:300] + " … resume with " + line.rpartition("with: ")[2].split(" model.")[0] + " …")
        if wrong:
            print("    " + "\n    ".join(seen.text.splitlines()[-25:]))
    if reference:
        print(f"mesh of all: {reference.mesh}")
    print("FAIL" if failed else "PASS")
    return 1 if failed else 0


def _wrong(seen: Seen, fault: str, reference: Seen | None) -> str:
    """What is not as it must be, in words; empty when all is."""
    problems = []
    if seen.orphans or seen.leftovers:
        problems.append("something was left behind")
    if not fault:
        if seen.code != 0 or len(seen.losses) != 2:
            problems.append(f"exit code {seen.code}, {len(seen.losses)} steps")
        elif reference and (seen.mesh != reference.mesh or not seen.mesh or any(abs(x - y) > 1e-6 for x, y in zip(seen.losses, reference.losses, strict=True))):
            problems.append("another mesh or loss")
        return "; ".join(problems)
    lines = [x for x in seen.text.splitlines() if x.startswith("megamoe: rank")]
    if seen.code in (0, -1):
        problems.append(f"exit code {seen.code}" if seen.code == 0 else "did not end by itself")
    if len(lines) != 1 or "resume from the last checkpoint with: " not in lines[0] or f"rank {RANKS - 1}" not in lines[0]:
        problems.append(f"{len(lines)} lines of ours, not one that names rank {RANKS - 1} and the way to resume")
    # Whichever rank speaks names a group that it shares with the hung one: its tp or its pp neighbour.
    if fault == "hung" and not re.search(rf"rank {RANKS - 1} \((tp|pp|edp|ep) \[[^)]*\) did not answer: last seen in «step 2: forward.*waited in «step 2: [^»]+» \(.*(operation|peer|closed)", "".join(lines)):
        problems.append("group, phase or operation is missing")
    return "; ".join(problems)


_MPI_STAND_IN = f"""
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:], env=os.environ | dict(OMPI_COMM_WORLD_RANK=str(r), OMPI_COMM_WORLD_LOCAL_RANK=str(r), OMPI_COMM_WORLD_SIZE='{RANKS}', OMPI_COMM_WORLD_LOCAL_SIZE='{RANKS}', PMIX_NAMESPACE='p7')) for r in range({RANKS})]
sys.exit(max(abs(p.wait()) for p in ranks))
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
