"""A backend chosen once per call site, at the first call: a layer built on the meta device knows neither device nor dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.ops.registry import choose


class LateChoice:
    """One call site's use of an op.

        self.mix = LateChoice("attn_res_mix", D=7168)          when the layer is built
        self.mix.on(x)(rows, query, weight)                    the backend for x's device and dtype, looked up once

    Args:
        op, prefer: as `registry.choose`.
        **facts: what the layer does know. `device`, `dtype` and `training` (is a gradient wanted) come from the call.

    An explicit request that cannot be met raises at the first call.
    """

    def __init__(self, op: str, *, prefer: str = "auto", **facts) -> None:
        self.op, self.prefer, self.facts = op, prefer, facts
        self._chosen: dict[tuple, Callable] = {}

    def on(self, x: torch.Tensor) -> Callable:
        """The backend for tensors like x."""
        seen = (x.device.type, x.dtype, torch.is_grad_enabled())
        if seen not in self._chosen:
            device, dtype, training = seen
            self._chosen[seen] = choose(self.op, prefer=self.prefer, device=device, dtype=dtype, training=training, **self.facts)
        return self._chosen[seen]
