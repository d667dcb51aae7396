"""No sink can stop a run, and what each shows is what was logged.

Why it matters: a dashboard outage at night must cost the dashboard, not the training.
Not covered: an online W&B run (no account here; the decision to go online is tested against local servers).
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megamoe.monitor import FirstScreen, Monitor
from megamoe.monitor.config import MonitorConfig, WandbMode
from megamoe.monitor.console import Console, Pace, clock_time, progress_line
from megamoe.monitor.metrics import guarded, read_load, read_metrics
from megamoe.monitor.screen import count
from megamoe.monitor.wandb_sink import decide_mode, utilisation
from megamoe.ops import registry
from megamoe.ops.registry import Choice
from megamoe.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789" * 4


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def make(tmp_path, screen, monkeypatch):
    # What other tests of this process made the registry choose is not this run's.
    monkeypatch.setattr(registry, "status", lambda: [Choice("moe_route", "reference", (("cuda", "no CUDA device here"),))])

    def build(config=None, **kwargs):
        return Monitor(config or MonitorConfig(wandb=WandbMode.off), tmp_path, {"train": {"num_steps": 20}}, "run1", console=Console(20, stream=screen), **kwargs)

    return build


class Broken:
    """A sink every call of which fails."""

    def __getattr__(self, name):
        def call(*args):
            raise RuntimeError(f"cannot {name}\nsecond line")

        return call


def test_a_run_is_written_and_shown(make, tmp_path, screen):
    monitor = make(restored_step=0)
    monitor.first_screen(FirstScreen("tiny", 4_312_448, 1_204_224, "1 rank", run_dir=str(tmp_path), num_steps=20, tokens_per_step=8192, seq_len=512,
                                     ops=[Choice("kda_chunk", "reference", (("cuda", "no GPU"),))], features=[("fused AdamW", "torch", "apex is not installed")]))
    for step in (1, 2):
        monitor.log(step, {"loss": 3.0 / step, "bits_per_byte": 2.0, "mfu": None, "grad_norm": 0.5, "maxvio/1": 0.25, "maxvio_max": 0.25})
        monitor.log_load(step, [[step, 2, 3], [4, 5, 6]])
    monitor.log(2, {"eval_loss": 1.25, "eval_bits_per_byte": 1.75})
    monitor.event("saved", "step 2")
    monitor.finish({"steps": 2, "loss": 1.5})
    text = screen.getvalue()
    for part in ("tiny: 4.31 M parameters, 1.20 M active", "kda_chunk", "(cuda: no GPU)", "apex is not installed", "metrics.jsonl",
                 "step  2/20", "loss 1.5000", "bits/byte 2.0000", "|g| 0.500", "maxvio 0.25", "held-out bits/byte 1.7500", "saved: step 2", "done in"):
        assert part in text
    assert "mfu" not in text
    found = read_metrics(tmp_path)
    assert found.series("loss") == ([1, 2], [3.0, 1.5]) and found.series("eval_loss") == ([2], [1.25]) and found.series("mfu") == ([], [])
    assert found.summary["loss"] == 1.5 and [e["message"] for e in found.events] == ["moe_route reference (cuda: no CUDA device here)", "step 2"]
    with np.load(tmp_path / "expert_load.npz") as archive:
        assert archive["step"].tolist() == [1, 2] and archive["load"].tolist() == read_load(tmp_path)[1].tolist() == [[[1, 2, 3], [4, 5, 6]], [[2, 2, 3], [4, 5, 6]]]


def test_a_broken_sink_is_switched_off_with_one_warning(make, tmp_path, screen):
    monitor = make()
    monitor._sinks["dashboard"] = Broken()
    for step in range(1, 5):
        monitor.log(step, {"loss": 1.0})
    monitor.finish({})
    assert screen.getvalue().count("dashboard is switched off") == 1
    assert "RuntimeError: cannot log second line" in screen.getvalue()
    assert len(read_metrics(tmp_path).rows) == 4
    assert [e["event"] for e in read_metrics(tmp_path).events] == ["warning"]


@pytest.mark.parametrize("call", ["log_load", "event", "finish"])
def test_no_call_of_a_sink_can_stop_the_run(make, call, screen):
    monitor = make()
    monitor._sinks["dashboard"] = Broken()
    {"log_load": lambda: monitor.log_load(1, [[1]]), "event": lambda: monitor.event("a", "b"), "finish": lambda: monitor.finish({})}[call]()
    assert screen.getvalue().count("dashboard is switched off") == 1


def test_a_closed_terminal_does_not_stop_the_run(make, tmp_path, screen):
    monitor = make()
    screen.close()
    monitor.log(1, {"loss": 1.0})
    monitor.event("saved", "x")
    monitor.finish({})
    assert len(read_metrics(tmp_path).rows) == 1


def test_a_full_disk_is_told_once_and_rows_come_back_with_the_room(make, tmp_path, screen, monkeypatch):
    monitor = make()
    real = os.write

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for step in (1, 2, 3):
        monitor.log(step, {"loss": 1.0})
    assert screen.getvalue().count("No space left on device") == 1
    monkeypatch.setattr(os, "write", real)
    monitor.log(4, {"loss": 1.0})
    assert [r["step"] for r in read_metrics(tmp_path).rows] == [4]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        Monitor(MonitorConfig(wandb=WandbMode.off), tmp_path / "file", {}, "id")
    assert "run.dir=" in str(caught.value) and "choose another" in str(caught.value) and "\n" not in str(caught.value)


def test_events_lose_the_passwords_of_urls(make, tmp_path, screen):
    monitor = make()
    monitor.event("data", "reading s3://me:hunter2@store/x")
    monitor.finish({})
    assert "hunter2" not in screen.getvalue() + (tmp_path / "metrics.jsonl").read_text()


def test_ops_chosen_with_the_first_batch_are_told_then(make, screen, monkeypatch):
    from megamoe.ops import registry

    chosen = [Choice("early", "reference", ())]
    monkeypatch.setattr(registry, "status", lambda: chosen)
    monitor = make()
    monitor.first_screen(FirstScreen("tiny", 1, 1, "1 rank", ops=list(chosen)))
    chosen.append(Choice("late", "cuda", (("fla", "needs Triton"),)))
    monitor.log(1, {"loss": 1.0})
    monitor.log(2, {"loss": 1.0})
    assert screen.getvalue().count("op: late cuda (fla: needs Triton)") == 1 and "op: early" not in screen.getvalue()


# --- console --------------------------------------------------------------------------------------------------------


def test_time_left_follows_the_recent_pace():
    pace = Pace()
    assert pace.seconds_left(0, 100) is None
    pace.update(10, 0.0)
    assert pace.seconds_left(10, 100) is None
    pace.update(20, 5.0)
    assert pace.seconds_left(20, 100) == pytest.approx(40.0)
    for step in range(30, 2000, 10):
        pace.update(step, 5.0 + (step - 20) * 2.0)
    assert pace.seconds_left(1990, 2000) == pytest.approx(20.0)
    assert pace.seconds_left(2000, 2000) == 0


def test_the_progress_line_leaves_out_what_is_not_known():
    assert progress_line(7, 300, {}, None) == "step   7/300"
    line = progress_line(120, 300, {"loss": 4.2, "tokens_per_s": 12345.0, "mfu": 0.31, "lr": 1e-3}, 151)
    assert line == "step 120/300  eta 2:31  loss 4.2000  12.35 k tok/s  mfu 31.0%"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (273900, "3d 04:05")])
def test_clock_time(seconds, text):
    assert clock_time(seconds) == text


@pytest.mark.parametrize(("n", "text"), [(0, "0"), (9999, "9,999"), (16384, "16.38 k"), (398_876_744, "399 M"), (2_779_484_476_000, "2.78 T"), (104.19e9, "104 B")])
def test_counts(n, text):
    assert count(n) == text


def test_a_terminal_gets_a_live_line_and_its_cursor_back(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    console = Console(10, stream=terminal)
    console.first_screen(FirstScreen("tiny[x]", 1, 1, "1 rank"))
    for step in (1, 2):
        console.log(step, {"loss": 1.0})
    console.finish(["done"])
    text = terminal.getvalue()
    assert "tiny[x]" in text and "step  2/10" in text and text.rstrip().endswith("done")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


# --- W&B ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A port that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_where_wandb_goes(server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        cases = [
            (WandbMode.off, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}, "off", ""),
            (WandbMode.auto, {"WANDB_MODE": "disabled"}, "off", ""),
            (WandbMode.offline, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}, "offline", "monitor.wandb=offline"),
            (WandbMode.auto, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server, "WANDB_MODE": "offline"}, "offline", "WANDB_MODE"),
            (WandbMode.auto, {}, "offline", "no WANDB_API_KEY"),
            (WandbMode.auto, {"WANDB_API_KEY": "rubbish", "WANDB_BASE_URL": server}, "offline", "not a key: 7 characters"),
            (WandbMode.auto, {"WANDB_API_KEY": "rub\nbish" * 9, "WANDB_BASE_URL": server}, "offline", "not a key"),
            (WandbMode.auto, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": closed}, "offline", "cannot be reached"),
            (WandbMode.auto, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "https://[not a url"}, "offline", "cannot be reached"),
            (WandbMode.auto, {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server}, "online", server),
        ]
        for wanted, environ, mode, reason in cases:
            got, why = decide_mode(wanted, environ, timeout_s=1.0)
            assert got == mode and reason in why, (environ, got, why)
            assert KEY not in why and "rubbish" not in why


OFFLINE_RUN = """
import sys
sys.path.insert(0, {root!r})
from megamoe.monitor import Monitor
from megamoe.monitor.config import MonitorConfig
monitor = Monitor(MonitorConfig(), {run!r}, {{"train": {{"num_steps": 2}}, "storage": {{"api_key": "hunter2"}}}}, "run1")
monitor.log(1, {{"loss": 1.0}})
monitor.log_load(1, [[1] * 896] * 92)
monitor.finish({{"loss": 1.0}})
"""


@pytest.mark.parametrize("environ", [{}, {"WANDB_API_KEY": "rubbish"}], ids=["no key", "rubbish key"])
def test_wandb_writes_an_offline_run_without_a_question(tmp_path, environ):
    """A process of its own with its standard input closed: a prompt would end it. K3's full load matrix goes through."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | environ
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", OFFLINE_RUN.format(root=str(ROOT), run=str(tmp_path))], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stdout and time.monotonic() - begin < 60
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1 and files[0].stat().st_size > 0
    everything = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"hunter2" not in everything and b"rubbish" not in everything


def test_a_server_that_refuses_the_key_leaves_an_offline_run(tmp_path):
    """Answers 401 to everything, as a wrong key gets. The run goes on, offline, within the time-out."""
    web = "import http.server\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_POST(self): self.send_response(401); self.end_headers()\n    do_GET = do_POST\n    def log_message(self, *a): pass\ns = http.server.HTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()"
    process = subprocess.Popen([sys.executable, "-c", web], stdout=subprocess.PIPE, text=True)
    try:
        base = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": base}
        done = subprocess.run([sys.executable, "-c", OFFLINE_RUN.format(root=str(ROOT), run=str(tmp_path))], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")), done.stdout + done.stderr
    finally:
        process.kill()
        process.wait()


def test_an_absent_wandb_costs_only_itself(make, tmp_path, screen, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monitor = make(MonitorConfig(wandb=WandbMode.offline))
    monitor.log(1, {"loss": 1.0})
    assert "W&B is switched off" in screen.getvalue() and len(read_metrics(tmp_path).rows) == 1


def test_utilisation_of_idle_layers_is_zero():
    assert utilisation([[1, 3], [0, 0]]).tolist() == [[0.5, 1.5], [0.0, 0.0]]


def test_guarded_lets_interrupts_through():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("x", interrupt, print)
