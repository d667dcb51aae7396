"""QK-clip: heads whose attention logits grew beyond a threshold get their query and key projections scaled down.

After a step, for a head whose largest logit m over the global batch exceeded tau, with gamma = tau / m:

    query rows, content part (qk_nope_head_dim)    times sqrt(gamma)
    key rows of kv_b                               times sqrt(gamma)
    query rows, "rope" part (qk_rope_head_dim)     times gamma
    key part that all heads share (kv_a)           left alone: it is not one head's

A logit is q_content.k_content + q_rope.k_shared. Both terms take exactly the factor gamma, with or without rotation (which is
linear in q), and no other head notices; so on the same inputs all logits of the head shrink by gamma and its largest
becomes tau. The latent norms stand in front of these rows, the gate behind them: neither undoes the scaling. KDA layers need
none: their queries and keys are normalised.

The factors go to whoever holds the masters, before low-precision weights are made from them (`Optimizer.apply`); momentum
is left as it is. Logits are those of the step's forward, the weights those after its update.

Source: arXiv:2507.20534 (rule, tau = 100), arXiv:2607.24653 sec. 3.3 (that the K3 family keeps it); code ours.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megamoe.layers.mla import MLA
from megamoe.optim.config import QKClipConfig
from megamoe.parallel.mesh import Mesh


class QKClip:
    """Watches the MLA layers of this rank's stage and says how their rows shrink.

    Args:
        model: this rank's part of the model.
        mesh: maxima are taken over dp·cp (their ranks hold the same heads and other tokens); heads cut over tp stay where
            they are.
    """

    def __init__(self, model: nn.Module, config: QKClipConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.layers = [m for m in model.modules() if isinstance(m, MLA)]
        self.device = next(model.parameters()).device
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Say before the forward which step this is (0-based): every `every`-th one is watched, whatever ran before it."""
        self.watching = step % self.config.every == 0
        for layer in self.layers:
            layer.watch_logits, layer.max_logit_H = self.watching, None

    def row_factors(self) -> dict[nn.Parameter, torch.Tensor]:
        """(rows,) factor for every row of the projections of the watched step; {} in a step that was not watched.

        Collective over dp·cp. No host sync: a factor of one changes no bit.
        """
        if not self.watching:
            return {}
        if not self.layers:
            self._last = torch.full((), float("-inf"), dtype=torch.float64, device=self.device), torch.zeros((), dtype=torch.float64, device=self.device)
            return {}
        max_LH = self._over_ranks(torch.stack([_maxima(layer) for layer in self.layers]))
        gamma_LH = torch.where(max_LH > self.config.tau, self.config.tau / max_LH, 1.0)
        self._last = max_LH.max().double(), (gamma_LH < 1).sum().double()
        return {weight: factor for layer, gamma_H in zip(self.layers, gamma_LH) for weight, factor in row_factors(layer, gamma_H).items()}

    def _over_ranks(self, max_LH: torch.Tensor) -> torch.Tensor:
        if self.mesh.dp_cp.group is not None:
            dist.all_reduce(max_LH, op=dist.ReduceOp.MAX, group=self.mesh.dp_cp.group)
        return max_LH

    def end_step(self) -> None:
        """Forget the step's maxima, also of one that was skipped."""
        for layer in self.layers:
            layer.max_logit_H = None

    def metrics(self) -> dict[str, float]:
        """Of the last watched step: largest logit of the model, heads clipped. Collective over the world; syncs the host."""
        if self._last is None:
            return {}
        top, clipped = (x.clone() for x in self._last)
        if self.mesh.world.group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.mesh.world.group)
            dist.all_reduce(clipped, group=self.mesh.world.group)
        if top.item() == float("-inf"):
            return {}
        # Ranks of dp·cp say the same of the same heads.
        return {"max_logit": top.item(), "heads_clipped": clipped.item() / self.mesh.dp_cp.size}


def row_factors(layer: MLA, gamma_H: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
    """(rows,) factors of the query projection and of kv_b for gamma_H, (H,) of this rank's heads, in gamma's dtype."""
    c = layer.config
    root_H1, gamma_H1 = gamma_H.sqrt()[:, None], gamma_H[:, None]
    query = layer.q_proj if c.q_lora_rank is None else layer.q_b_proj
    return {
        query.weight: torch.cat([root_H1.expand(-1, c.qk_nope_head_dim), gamma_H1.expand(-1, c.qk_rope_head_dim)], 1).flatten(),
        layer.kv_b_proj.weight: torch.cat([root_H1.expand(-1, c.qk_nope_head_dim), torch.ones_like(gamma_H1).expand(-1, c.v_head_dim)], 1).flatten(),
    }


def _maxima(layer: MLA) -> torch.Tensor:
    assert layer.max_logit_H is not None, "an MLA layer was watched, but no forward with gradients ran since begin_step"
    return layer.max_logit_H
