"""One product in the wide dtype."""

from __future__ import annotations

import torch.nn.functional as F

from megamoe.ops.precision import wide


def router_logits(x_ND, weight_ED):
    """See the contract in `megamoe.ops.router_logits`."""
    dtype = wide(x_ND.dtype)
    return F.linear(x_ND.to(dtype), weight_ED.to(dtype))
