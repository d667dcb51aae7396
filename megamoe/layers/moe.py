"""Stable LatentMoE: routed experts in a latent width, shared experts in the model width.

    idx, p = router(x)                                 full-width x, fp32
    z = Wdown x                                        (latent: null skips the three latent pieces)
    u = sum_i p_i E_i(z)                               weights late, products and sum in fp32
    y = Wup RMS(u) + Shared(x)                         norm after the weighted sum

Letters: N tokens, D model width, L width of routed experts, F expert width, E experts in all, e here, R rows.
Source: arXiv:2607.24653 sec. 2.3, arXiv:2601.18089; code ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from megamoe.layers.basic import Linear, RMSNorm
from megamoe.layers.config import QAT, FFNConfig, MoEConfig, Placement
from megamoe.layers.ffn import GatedMLP
from megamoe.layers.router import Router, RouterStats
from megamoe.ops import grouped_mlp, moe_dispatch, mxfp4
from megamoe.ops.late import LateChoice
from megamoe.ops.moe_dispatch import balanced


class Experts(nn.Module):
    """This rank's routed experts, stacked. w1 = gate, w3 = up: (e, F, L); w2 = down: (e, L, F).

    With `qat` the products see weights rounded to MXFP4, in groups of 32 along their input dim, whatever the backend; masters
    and gradients are those of the unrounded weights (straight-through). The rounded stacks are kept inside `hold_rounded`.
    """

    STACKS = ("w1", "w3", "w2")

    def __init__(self, num_local: int, width: int, size: int, ffn: FFNConfig, backend: str, qat: QAT = QAT.off) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_local, size, width))
        self.w3 = nn.Parameter(torch.empty(num_local, size, width))
        self.w2 = nn.Parameter(torch.empty(num_local, width, size))
        self.qat = qat
        # Buffers, so that whatever treats a layer's weights as resident (offload) finds these among them; not saved.
        for name in self.STACKS:
            self.register_buffer(f"{name}_rounded", None, persistent=False)
        self.act = dict(act=ffn.act.name, act_beta=ffn.situ_beta, act_linear_beta=ffn.situ_linear_beta)
        if qat is not QAT.off:
            self.act["mxfp8_hidden"] = True
        self.op = LateChoice(grouped_mlp.OP, prefer=backend, D=width, F=size)

    def forward(self, rows_RL: torch.Tensor, count_e: torch.Tensor, compute=None) -> torch.Tensor:
        """rows_RL: (R, L) by expert, count_e rows of each. `compute` runs the op over own and borrowed experts (balanced placement)."""
        mlp, weights = partial(self.op.on(rows_RL), **self.act), [self._seen(name) for name in self.STACKS]
        return mlp(rows_RL, count_e, *weights) if compute is None else compute(mlp, rows_RL, count_e, *weights)

    def _seen(self, name: str) -> torch.Tensor:
        """The stack as the products see it."""
        w = getattr(self, name)
        if self.qat is QAT.off:
            return w
        rounded = mxfp4.fake_quantize(w, "mxfp4", getattr(self, f"{name}_rounded"))
        if hasattr(w, "main_grad"):
            rounded.main_grad = w.main_grad
        return rounded

    @torch.no_grad()
    def round_now(self) -> None:
        """Round the present weights and keep the result until `forget_rounded`."""
        for name in self.STACKS:
            setattr(self, f"{name}_rounded", mxfp4.round_to(getattr(self, name), "mxfp4"))

    def forget_rounded(self) -> None:
        for name in self.STACKS:
            setattr(self, f"{name}_rounded", None)


@contextlib.contextmanager
def hold_rounded(model: nn.Module) -> Iterator[None]:
    """Weights do not change inside this context: experts trained for low precision round theirs once, at its start.

    One pass over the weights a step instead of one a micro-batch, and one rounded copy (2 bytes a weight in bf16) for all
    micro-batches under way, which would each keep their own for backward.
    """
    experts = [m for m in model.modules() if isinstance(m, Experts) and m.qat is not QAT.off]
    for module in experts:
        module.round_now()
    try:
        yield
    finally:
        for module in experts:
            module.forget_rounded()


class MoE(nn.Module):
    """One MoE layer.

    Attributes:
        group: expert-parallel group, or None: all experts here.
        first_expert, num_local: which global experts this rank holds.
    """

    def __init__(self, d_model: int, norm_eps: float, config: MoEConfig, ffn: FFNConfig, *, group=None, first_expert: int = 0, num_local: int | None = None) -> None:
        super().__init__()
        self.config, self.group = config, group
        # One rank has nobody to borrow from.
        self.balanced = config.placement is Placement.balanced and group is not None
        self.first_expert = first_expert
        self.num_local = config.num_experts if num_local is None else num_local
        width = d_model if config.latent is None else config.latent
        self.gate = Router(d_model, config)
        self.experts = Experts(self.num_local, width, config.expert_size, ffn, config.grouped_mlp, config.qat)
        if config.latent is not None:
            self.routed_expert_down_proj = Linear(d_model, config.latent)
            self.routed_expert_up_proj = Linear(config.latent, d_model)
            self.routed_expert_norm = RMSNorm(config.latent, norm_eps) if config.latent_norm else nn.Identity()
        if config.num_shared_experts:
            self.shared_experts = GatedMLP(d_model, config.shared_size, ffn)
        self._side: torch.cuda.Stream | None = None
        self.dispatch = LateChoice(moe_dispatch.OP, prefer=config.dispatch, D=width, E=config.num_experts, A=config.top_k)

    def forward(self, x_ND: torch.Tensor, token_mask_N: torch.Tensor | None = None) -> tuple[torch.Tensor, RouterStats | None]:
        """x_ND: (N, D) normalised layer input. Returns (N, D) in x's dtype, and the statistics to accumulate.

        Collective over `group`, also when N = 0.
        """
        shared = self._start_shared(x_ND)
        idx_NA, weight_NA, stats = self.gate(x_ND, token_mask_N)
        latent = self.config.latent is not None
        z_NL = self.routed_expert_down_proj(x_ND) if latent else x_ND
        if self.config.qat is not QAT.off:
            # Before tokens are copied to their experts: one rounding a token, not one a slot.
            z_NL = mxfp4.fake_quantize(z_NL, "mxfp8")
        dispatch, compute = self.dispatch.on(z_NL), None
        if self.balanced:
            dispatch = partial(balanced.dispatch, local=dispatch)
        rows_RL, count_e, handle = dispatch(z_NL, idx_NA, weight_NA, group=self.group, num_experts=self.config.num_experts)
        if self.balanced:
            compute = handle.compute
        y_ND = moe_dispatch.combine(self.experts(rows_RL, count_e, compute), handle)
        if latent:
            y_ND = self.routed_expert_up_proj(self.routed_expert_norm(y_ND))
        if self.config.num_shared_experts:
            y_ND = y_ND + (self.shared_experts(x_ND) if shared is None else shared())
        return y_ND, stats

    def _start_shared(self, x_ND: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Enqueue the shared experts on a second stream; what is returned waits for them. None: they run in line.

        Not over tensor-parallel ranks: their collectives would enter one communicator from two streams. Backward runs on the
        streams of forward; autograd sees to the order.
        """
        cut = self.config.num_shared_experts and getattr(getattr(self.shared_experts, "tp", None), "group", None) is not None
        if not (self.config.shared_stream and self.config.num_shared_experts and x_ND.is_cuda) or cut:
            return None
        main = torch.cuda.current_stream()
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            y_ND = self.shared_experts(x_ND)
        # Blocks go back to the stream that asked for them: not before the other one is through with them, backward included.
        x_ND.record_stream(self._side)

        def wait() -> torch.Tensor:
            main.wait_stream(self._side)
            y_ND.record_stream(main)
            return y_ND

        return wait
