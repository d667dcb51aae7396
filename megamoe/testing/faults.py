"""Faults that were made, or nearly made, in parallel training code. The proof must catch each of them.

A fault is a context manager that damages the running code and yields `damage(stage, mesh)`, called once when the stage is
built and before it gets its values. Only tests plant them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from megamoe.layers.moe import Experts
from megamoe.layers.router import Router
from megamoe.ops.moe_dispatch.balanced import Loans
from megamoe.optim.qk_clip import QKClip
from megamoe.parallel.context import ContextKDA
from megamoe.parallel.engine import PlainEngine
from megamoe.parallel.pipeline import Pipeline

Damage = Callable[[torch.nn.Module, object], None]


def _nothing(stage, mesh) -> None:
    pass


def _change_record(suffix: str, **changes) -> Damage:
    def damage(stage, mesh) -> None:
        hits = [p for p in stage.parameters() if p.megamoe.name.endswith(suffix)]
        for p in hits:
            p.megamoe = replace(p.megamoe, **{k: v(p, mesh) if callable(v) else v for k, v in changes.items()})

    return damage


@contextlib.contextmanager
def none() -> Iterator[Damage]:
    yield _nothing


@contextlib.contextmanager
def wrong_group() -> Iterator[Damage]:
    """A norm weight, whose parts lie on all tp ranks' tokens, is summed over dp·cp only."""
    yield _change_record("input_layernorm.weight", reduce_axis="dp_cp")


@contextlib.contextmanager
def missing_halo() -> Iterator[Damage]:
    """Convolutions see zeros in front of their slice."""
    original = ContextKDA._history

    def history(self, x_TD, stream):
        state = original(self, x_TD, stream)
        return state._replace(**{k: getattr(state, k) * 0 for k in ("q_NWC", "k_NWC", "v_NWC")})

    with mock.patch.object(ContextKDA, "_history", history):
        yield _nothing


@contextlib.contextmanager
def doubled_gradient() -> Iterator[Damage]:
    """The data-parallel sum runs twice."""
    original = PlainEngine.reduce

    def reduce(self):
        original(self)
        original(self)

    with mock.patch.object(PlainEngine, "reduce", reduce):
        yield _nothing


@contextlib.contextmanager
def histogram_counted_twice() -> Iterator[Damage]:
    """Statistics are added up inside the recomputed function, once in forward and once more in backward."""
    original = Router.forward

    def forward(self, *args):
        out = original(self, *args)
        if out[2] is not None:
            Router.accumulate_(self, out[2])
        return out

    Router.accumulate_ = Router.accumulate
    with mock.patch.object(Router, "forward", forward), mock.patch.object(Router, "accumulate", lambda self, stats: None):
        yield _nothing


@contextlib.contextmanager
def norm_counts_replicas() -> Iterator[Damage]:
    """Every rank adds the whole square of a gradient that all hold."""
    original = PlainEngine.squared_norm
    with mock.patch.object(PlainEngine, "squared_norm", lambda self: original(self) * self.axis.size):
        yield _nothing


@contextlib.contextmanager
def stale_row() -> Iterator[Damage]:
    """A rank mixes an AttnRes row of the micro-batch before."""
    original = Pipeline._incoming

    def incoming(self, action, flight, count):
        parts = original(self, action, flight, count)
        if action.kind == "F" and count > 1:
            kept = getattr(self, "_stale", None)
            self._stale = parts[0].detach().clone()
            if kept is not None:
                parts[0].data.copy_(kept)
        return parts

    with mock.patch.object(Pipeline, "_incoming", incoming):
        yield _nothing


@contextlib.contextmanager
def row_sent_twice() -> Iterator[Damage]:
    """A row that the receiver has seen travels once more with every message. Nothing is computed differently."""
    incoming, send = Pipeline._incoming, Pipeline._send
    with (
        mock.patch.object(Pipeline, "_incoming", lambda self, action, flight, count: incoming(self, action, flight, count + 1)[:-1]),
        mock.patch.object(Pipeline, "_send", lambda self, action, x: send(self, action, torch.cat([x, x[:1]]))),
    ):
        yield _nothing


@contextlib.contextmanager
def unflagged_tp_weight() -> Iterator[Damage]:
    """A weight that is cut over tp is taken for a replica: its slices' gradients are summed together."""
    yield _change_record("o_proj.weight", reduce_axis="stage")


@contextlib.contextmanager
def cp_loss_scale() -> Iterator[Damage]:
    """Each cp rank averages over its own slice: the sum is cp times too large."""
    original = Pipeline._loss

    def loss(self, bank, prefix, batch, stream, scale):
        return original(self, bank, prefix, batch, stream, scale * self.mesh.cp.size)

    with mock.patch.object(Pipeline, "_loss", loss):
        yield _nothing


@contextlib.contextmanager
def wrong_head_slice() -> Iterator[Damage]:
    """Keys of another rank's heads meet this rank's queries."""
    yield _change_record("k_proj.weight", offset=lambda p, mesh: ((mesh.tp.rank + 1) % mesh.tp.size * p.shape[0], 0))


@contextlib.contextmanager
def expert_id_shifted() -> Iterator[Damage]:
    """Every rank holds the experts of its neighbour."""
    shift = lambda p, mesh: tuple((i + 1) % p.megamoe.global_shape[0] for i in p.megamoe.expert_ids)  # noqa: E731
    yield _change_record("experts.w2", expert_ids=shift)


@contextlib.contextmanager
def logit_maxima_of_the_wrong_group() -> Iterator[Damage]:
    """Maxima are taken over tp, whose ranks hold other heads, instead of dp·cp, whose ranks hold other tokens."""

    def over_ranks(self, max_LH):
        dist.all_reduce(max_LH, op=dist.ReduceOp.MAX, group=self.mesh.tp.group)
        return max_LH

    with mock.patch.object(QKClip, "_over_ranks", over_ranks):
        yield _nothing


@contextlib.contextmanager
def lent_gradient_lost() -> Iterator[Damage]:
    """What a borrowing rank learned about an expert is not added at its home."""
    original = Loans.send_home
    with mock.patch.object(Loans, "send_home", lambda self, dw: {e: [d * 0 for d in back] for e, back in original(self, dw).items()}):
        yield _nothing


@contextlib.contextmanager
def stale_rounded_weights() -> Iterator[Damage]:
    """Experts keep the MXFP4 copy of the first step's weights."""
    original = Experts.round_now

    def round_now(self):
        if self.w1_rounded is None:
            original(self)

    with mock.patch.object(Experts, "round_now", round_now), mock.patch.object(Experts, "forget_rounded", lambda self: None):
        yield _nothing


FAULTS = {"": none} | {f.__name__: f for f in (
    wrong_group, missing_halo, doubled_gradient, histogram_counted_twice, norm_counts_replicas,
    stale_row, row_sent_twice, unflagged_tp_weight, cp_loss_scale, wrong_head_slice, expert_id_shifted, logit_maxima_of_the_wrong_group,
    lent_gradient_lost, stale_rounded_weights,
)}  # fmt: skip
