"""Weights & Biases as a view of the run: online when a usable key and a network are there, else offline on disk.

Never an exception, a prompt or a long wait: the key's form and the server's port are looked at before the library is
asked to connect, every wait has an end, and what still fails is the caller's to switch off. wandb is imported here only
when the sink is wanted (1.7 s).

Shapes: wandb refuses histograms above 512 bins, and one scalar per expert would make tens of thousands of series. The
load goes as a 64-bin histogram of utilisation and as an image; the full matrix stays in the run folder.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from megamoe.monitor.config import MonitorConfig, WandbMode
from megamoe.utils.redact import redact

DEFAULT_SERVER = "https://api.wandb.ai"
MIN_KEY_LENGTH = 40
CONNECT_TIMEOUT_S = 2.0
INIT_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 20.0
UTILISATION_BINS = 64
IMAGE_INTERVAL_S = 60.0


def decide_mode(wanted: WandbMode, environ: Mapping[str, str], *, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple[str, str]:
    """`online` or `offline`, or `off`, with the reason in words. Touches the network only when there is a key."""
    if wanted is WandbMode.off or environ.get("WANDB_MODE") == "disabled":
        return "off", "switched off"
    if wanted is WandbMode.offline:
        return "offline", "monitor.wandb=offline"
    if environ.get("WANDB_MODE") in ("offline", "dryrun"):
        return "offline", f"WANDB_MODE={environ['WANDB_MODE']}"
    key = environ.get("WANDB_API_KEY", "")
    if not key:
        return "offline", "no WANDB_API_KEY in the environment"
    if len(key) < MIN_KEY_LENGTH or not key.isprintable() or " " in key:
        return "offline", f"WANDB_API_KEY is not a key: {len(key)} characters, at least {MIN_KEY_LENGTH} expected"
    server = environ.get("WANDB_BASE_URL", DEFAULT_SERVER)
    unreachable = _unreachable(server, timeout_s)
    return ("offline", f"{server} cannot be reached ({unreachable})") if unreachable else ("online", server)


def _unreachable(server: str, timeout_s: float) -> str | None:
    try:
        parts = urllib.parse.urlsplit(server)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


class WandbSink:
    """One W&B run. `mode` and `reason` say what it became.

    Args:
        config: the monitor section.
        run_dir: the run folder; wandb writes below it.
        resolved: the configuration; secrets are redacted here.
        run_id: identity of the run: a resumed attempt continues the same W&B run.

    Raises:
        Exception: whatever wandb raises when even an offline run cannot be made.
    """

    def __init__(self, config: MonitorConfig, run_dir: str | Path, resolved: dict, run_id: str, *, environ: Mapping[str, str] = os.environ):
        self.mode, self.reason = decide_mode(config.wandb, environ)
        self.run = None
        self._image_at = -1e9
        if self.mode == "off":
            return
        import wandb

        if self.mode == "online":
            try:
                self._init(wandb, config, run_dir, resolved, run_id)
                return
            except Exception as error:  # noqa: BLE001 - a refused key and a dying network look alike: stay offline
                self.mode, self.reason = "offline", " ".join(str(error).split())[:200]
                # Its background service still holds the run's id for the attempt that failed.
                wandb.teardown()
        self._init(wandb, config, run_dir, resolved, run_id)

    def _init(self, wandb, config: MonitorConfig, run_dir: str | Path, resolved: dict, run_id: str) -> None:
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            init_timeout=INIT_TIMEOUT_S,
            login_timeout=int(INIT_TIMEOUT_S),
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=False,
        )
        self.run = wandb.init(
            project=config.wandb_project,
            id=run_id,
            name=Path(run_dir).name,
            dir=str(run_dir),
            config=redact(resolved),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            settings=settings,
        )
        # Our own step axis: wandb's would refuse the rows that a resumed run repeats.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, row: dict) -> None:
        if self.run is not None:
            self.run.log({"step": step, **row})

    def log_load(self, step: int, load_LE) -> None:
        """A histogram of load over its layer's mean, and at most once a minute the matrix as an image."""
        if self.run is None:
            return
        import numpy as np
        import wandb

        utilisation_LE = utilisation(load_LE)
        edges = np.linspace(0.0, max(4.0, float(utilisation_LE.max(initial=0.0))), UTILISATION_BINS + 1)
        values: dict = {"step": step, "expert_utilisation": wandb.Histogram(np_histogram=np.histogram(utilisation_LE, bins=edges))}
        if time.monotonic() - self._image_at >= IMAGE_INTERVAL_S:
            self._image_at = time.monotonic()
            values["expert_load"] = wandb.Image(_grey_image(utilisation_LE), caption="rows: layers, columns: experts; white = twice the mean")
        self.run.log(values)

    def event(self, kind: str, message: str) -> None:
        """Events stay in metrics.jsonl."""

    def finish(self, summary: dict) -> None:
        if self.run is None:
            return
        for key, value in summary.items():
            self.run.summary[key] = value
        plot = summary.get("plot")
        if plot and Path(plot).is_file():
            import wandb

            self.run.log({"plot": wandb.Image(str(plot))})
        self.run.finish()
        self.run = None


def utilisation(load_LE):
    """(layers, experts) counts → load over the mean of its layer, float64; a layer without tokens is all zero."""
    import numpy as np

    load_LE = np.asarray(load_LE, dtype=np.float64)
    mean_L1 = load_LE.mean(axis=1, keepdims=True)
    return np.divide(load_LE, mean_L1, out=np.zeros_like(load_LE), where=mean_L1 > 0)


def _grey_image(utilisation_LE):
    """0 is black, twice the mean or more white; small matrices are enlarged so that a cell can be seen."""
    import numpy as np

    pixels = np.clip(utilisation_LE * 127.5, 0, 255).astype(np.uint8)
    zoom = max(1, 256 // max(pixels.shape))
    return np.kron(pixels, np.ones((zoom, zoom), dtype=np.uint8))
