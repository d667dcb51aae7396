"""Names that torch changed between the versions we support (2.11 and newer)."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 renamed the flat collectives and warns on every call of the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
