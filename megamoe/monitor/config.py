"""Configuration of what a person sees. No torch import here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megamoe.utils.errors import check


class WandbMode(enum.Enum):
    """`auto` goes online when a key is in the environment, else offline. Neither ever prompts or stops the run."""

    auto = "auto"
    offline = "offline"
    off = "off"


@dataclass
class MonitorConfig:
    """
    Attributes:
        log_interval_steps: the one host sync of the loop: metrics are read back and written every so many steps.
        load_interval_steps: every so many steps the full (layer × expert) load matrix goes to the run folder.
        wandb, wandb_project: Weights & Biases sink; its key comes only from the environment.
        tensorboard: write event files too (needs the tensorboard package).
    """

    log_interval_steps: int = 1
    load_interval_steps: int = 10
    wandb: WandbMode = WandbMode.auto
    wandb_project: str = "megamoe"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check(self.log_interval_steps >= 1, "monitor.log_interval_steps", self.log_interval_steps, "must be at least 1")
        check(self.load_interval_steps >= 1, "monitor.load_interval_steps", self.load_interval_steps, "must be at least 1")
