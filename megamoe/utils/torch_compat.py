"""Names that torch changed between the versions we support (2.11 and newer)."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

# torch 2.13 renamed the flat collectives and warns on every call of the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_timeout(group, device_type: str) -> datetime.timedelta:
    """The time-out that a process group was made with; no public name tells it. torch's own default where it cannot be told."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)
