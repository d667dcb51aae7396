"""Which checkpoints stay, and how the others go: unlisted first, deleted after.

A checkpoint exists while its pointer does, so one whose deletion is cut short is a left-over like any other and never half a
checkpoint.
"""

from __future__ import annotations

import json
import logging

from megamoe.checkpoint.config import CheckpointConfig
from megamoe.checkpoint.format import COMMIT
from megamoe.checkpoint.objects import Objects, StoreError
from megamoe.checkpoint.reader import committed

log = logging.getLogger(__name__)

TAG = "tag_"
# What "best" means: the held-out loss that a save recorded in its pointer.
BEST_METRIC = "eval_loss"


def kept(steps: dict[int, dict[str, float]], config: CheckpointConfig) -> set[int]:
    """Steps that stay, tags aside: the last ones, every n-th, and the best. Pure.

    Args:
        steps: committed step -> metrics of its pointer.
    """
    order = sorted(steps)
    stay = set(order[-config.keep_last :])
    if config.keep_every_steps:
        stay |= {step for step in order if step % config.keep_every_steps == 0}
    if config.keep_best:
        measured = [step for step in order if isinstance(steps[step].get(BEST_METRIC), (int, float))]
        stay |= set(sorted(measured, key=lambda step: (steps[step][BEST_METRIC], step))[: config.keep_best])
    return stay


def retire(place: Objects, config: CheckpointConfig) -> list[int]:
    """Delete the checkpoints that no rule keeps and nobody has tagged; returns their steps. One process at a time.

    A place that cannot be listed or a checkpoint that cannot be deleted now waits for the next time.
    """
    try:
        pointers = {folder: json.loads(place.get(f"{folder}/{COMMIT}")) for folder in committed(place)}
        steps = {int(folder.removeprefix("step_")): pointer.get("metrics") or {} for folder, pointer in pointers.items()}
        stay, gone = kept(steps, config), []
        for folder, pointer in pointers.items():
            step = int(folder.removeprefix("step_"))
            if step in stay or any(name.startswith(f"{folder}/{TAG}") for name in place.sizes(folder)):
                continue
            place.delete([f"{folder}/{COMMIT}"])
            # Only the attempt that was committed: another run may be writing this step here.
            place.delete_folder(f"{folder}/{pointer['attempt']}")
            place.delete_empty(folder)
            gone.append(step)
        return gone
    except (StoreError, FileNotFoundError, ValueError, KeyError, AttributeError) as error:
        log.warning("old checkpoints in %s stay for now (%s)", place.location, error)
        return []


def sweep(place: Objects, run_id: str) -> list[str]:
    """Delete what unfinished saves of this run left behind; returns the folders. Only while no save of this run is under way.

    Attempts of other runs are left alone: they may be alive.
    """
    removed = []
    try:
        for folder in place.folders():
            if not folder.startswith("step_"):
                continue
            names = place.sizes(folder)
            current = json.loads(place.get(f"{folder}/{COMMIT}")).get("attempt") if f"{folder}/{COMMIT}" in names else None
            for attempt in place.folders(folder):
                if attempt.startswith(run_id) and attempt != current:
                    place.delete_folder(f"{folder}/{attempt}")
                    removed.append(f"{folder}/{attempt}")
            if current is None:
                place.delete_empty(folder)
    except (StoreError, FileNotFoundError, ValueError, AttributeError) as error:
        log.warning("left-overs of unfinished saves in %s stay for now (%s)", place.location, error)
    return removed
