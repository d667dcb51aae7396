"""Bytes over every pipeline boundary: what the ranks counted while they ran, beside two formulas.

    cached   each rank keeps the AttnRes rows it has seen of a micro-batch, and receives only new ones (what `pipeline.py` does)
    naive    every finished row travels over every boundary

Plus the running sum, in both. A boundary lies between chunk c and chunk c+1; tensors go forward over it, their gradients back.
Idea and formulas: arXiv:2603.15031 sec. 4; code ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe.parallel.stages import plan_stages

if TYPE_CHECKING:
    from megamoe.testing.proof import Case


@dataclass(frozen=True)
class Boundary:
    """Bytes of a whole proof (all steps, micro-batches and dp, cp, tp ranks) over one boundary.

    Attributes:
        chunk: the chunk in front of it.
        ranks: pipeline ranks of the two sides.
        forward, backward: counted where tensors were sent.
        cached, naive: formulas, for one direction.
    """

    chunk: int
    ranks: tuple[int, int]
    forward: int
    backward: int
    cached: int
    naive: int

    @property
    def off(self) -> float:
        """Relative distance of the counted bytes from the cached formula, the worse direction; exactly 0 when it holds."""
        return max(abs(n - self.cached) for n in (self.forward, self.backward)) / self.cached


def boundaries(case: Case, ranks: Sequence[dict], *, tokens: int, steps: int, itemsize: int) -> tuple[Boundary, ...]:
    """Every boundary of a case; none without a pipeline.

    Args:
        ranks: traces of all ranks; `bytes_sent[kind][boundary]` is what each has sent.
        tokens: of a micro-batch, before it is cut over cp and tp.
        itemsize: bytes of a number of the residual stream.

    The formulas read the case alone, never what ran.
    """
    plan, P = plan_stages(case.model, case.parallel), case.parallel.pp
    if P == 1:
        return ()
    tensor_bytes = tokens * case.model.d_model * itemsize * case.num_micro_batches * steps
    cached, naive = plan.tensors_per_boundary(), plan.tensors_per_boundary(cached=False)
    sent = {kind: [sum(r["bytes_sent"][kind][b] for r in ranks) for b in range(plan.num_chunks - 1)] for kind in "FB"}
    return tuple(
        Boundary(b, (b % P, (b + 1) % P), sent["F"][b], sent["B"][b], cached[b] * tensor_bytes, naive[b] * tensor_bytes) for b in range(plan.num_chunks - 1)
    )
