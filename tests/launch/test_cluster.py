"""The cluster files say what the code expects. Why it matters: they are run where nobody can debug them.

Checked: the Job's own consistency and the fields without which it hangs or fails; the Slurm script with a stand-in for srun
that sets srun's variables, up to the command each task runs and the rank it takes itself for; the hostfile with
DeepSpeed's own reader. Not covered: a real cluster, a real scheduler, RDMA.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from launch.environment import read_launch

ROOT = Path(__file__).resolve().parents[2]


def _k8s() -> tuple[dict, dict]:
    service, job = yaml.safe_load_all((ROOT / "launch/k8s/pretrain.yaml").read_text())
    return service, job


def test_kubernetes_job_is_consistent():
    service, job = _k8s()
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    nodes = spec["completions"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == nodes, "all pods at once, each with an index"
    assert f"--nnodes={nodes}" in container["args"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    # Pod 0's name: <job>-0.<subdomain>; the service must be headless, of that name, and select the job's pods.
    name, subdomain = job["metadata"]["name"], pod["subdomain"]
    assert f"--master-addr={name}-0.{subdomain}" in container["args"]
    assert service["metadata"]["name"] == subdomain and service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert f"--master-port={service['spec']['ports'][0]['port']}" in container["args"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    assert {e["name"] for e in container["env"]} >= {"JOB_COMPLETION_INDEX"}


def test_kubernetes_overrides_compose():
    from launch.schema import compose

    args = _k8s()[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    config = compose(args[args.index("launch/pretrain.py") + 1 :])
    world = 16
    assert config.parallel.resolve_dp(world) * config.parallel.tp * config.parallel.pp * config.parallel.cp == world


def test_slurm_script_hands_its_arguments_and_variables_to_every_task(tmp_path):
    # srun's stand-in: two tasks, one after another, with the variables that srun sets.
    srun = tmp_path / "srun"
    srun.write_text('#!/usr/bin/env bash\nwhile [[ "$1" == --* ]]; do shift; done\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=node-a SLURM_STEP_ID=0 "$@"; done\n')
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "task $SLURM_PROCID: $*"\n')
    for f in (srun, python):
        f.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGAMOE_DIR": str(ROOT), "MEGAMOE_PYTHON": str(python), "SLURM_JOB_ID": "7"}
    out = subprocess.run(["bash", str(ROOT / "launch/slurm/pretrain.sbatch"), "parallel.tp=2", "run.dir=a b"], env=env, text=True, capture_output=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [f"task {i}: launch/pretrain.py parallel.tp=2 run.dir=a b" for i in range(2)]
    variables = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node-a", "SLURM_JOB_ID": "7"}
    launch = read_launch(variables)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == ("slurm", 1, 1, 2)


def test_slurm_job_is_requeued_when_it_was_stopped_and_only_then(tmp_path):
    """Slurm takes a run that saved and left by itself for a finished one."""
    stand_ins = {
        "srun": 'printf "$REASON" > "$MEGAMOE_STOP_NOTE"; [[ -s "$MEGAMOE_STOP_NOTE" ]] || rm "$MEGAMOE_STOP_NOTE"; exit $CODE',
        "squeue": 'echo "$STATE"',
        "scontrol": 'echo "scontrol $*"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def requeued(reason: str, state: str = "RUNNING", code: int = 0) -> bool:
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGAMOE_DIR": str(ROOT), "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7", "REASON": reason, "STATE": state, "CODE": str(code)}
        out = subprocess.run(["bash", str(ROOT / "launch/slurm/pretrain.sbatch")], env=env, text=True, capture_output=True, timeout=60)
        assert out.returncode == code, out.stderr
        return "scontrol requeue 7" in out.stdout

    assert requeued("SIGTERM\\n")
    assert not requeued("")
    assert not requeued("train.max_minutes=5.0\\n")
    assert not requeued("SIGTERM\\n", state="COMPLETING")
    assert not requeued("SIGTERM\\n", code=1)
    assert not list(tmp_path.glob("megamoe-stopped-*")) or requeued("") is False, "a note of an earlier start must not speak for this one"


def test_a_stopped_run_says_why_and_a_finished_one_says_nothing(tmp_path):
    from launch.pretrain import leave_stop_note

    for reason, left in (("SIGTERM", "SIGTERM\n"), ("", None)):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "attempt", "run_id": "a", "attempt": 1, "time": 0.0}) + "\n" + json.dumps({"kind": "summary", "run_id": "a", "attempt": 1, "time": 1.0, "stopped": reason}) + "\n")
        (note := tmp_path / "note").unlink(missing_ok=True)
        leave_stop_note(str(tmp_path), note)
        assert (note.read_text() if note.exists() else None) == left


def test_slurm_resources_are_one_task_per_gpu():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", (ROOT / "launch/slurm/pretrain.sbatch").read_text(), re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("TERM@"), "a polite stop needs the signal the run listens for"


def test_hostfile_is_what_deepspeed_reads():
    code = f"from deepspeed.launcher.runner import fetch_hostfile; print(dict(fetch_hostfile({str(ROOT / 'launch/hostfile.example')!r})))"
    out = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert "{'node-a': 8, 'node-b': 8}" in out.stdout, out.stderr
