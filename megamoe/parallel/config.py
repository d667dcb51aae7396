"""Configuration of the mesh: how many ranks along each axis. No torch import here."""

from __future__ import annotations

from dataclasses import dataclass, field

from megamoe.utils.errors import check


@dataclass
class ParallelConfig:
    """Sizes of the parallel axes; the product pp·dp·cp·tp is the number of ranks.

    Attributes:
        dp: data-parallel ranks; 0 takes what the other axes leave of the world.
        tp, pp, cp, ep: tensor, pipeline, context and expert-parallel sizes.
        vpp: virtual pipeline stages per rank (interleaved 1F1B).
        stage_layers: layers of each of the pp·vpp pipeline chunks, in the model's order; empty balances them by cost.
        ranks_per_device: local ranks that share one GPU (proofs of a layout on few devices).
        timeout_s: time-out of every process group: a collective that waits longer ends the run.
    """

    dp: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    stage_layers: list[int] = field(default_factory=list)
    ranks_per_device: int = 1
    timeout_s: int = 600

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "ep", "vpp", "ranks_per_device"):
            check(getattr(self, axis) >= 1, f"parallel.{axis}", getattr(self, axis), "must be at least 1")
        check(self.dp >= 0, "parallel.dp", self.dp, "must be positive, or 0 to take what the other axes leave")
        check(self.vpp == 1 or self.pp > 1, "parallel.vpp", self.vpp, "virtual stages need parallel.pp of 2 or more; use vpp=1")
        check(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "must be a positive number of seconds")

    def resolve_dp(self, world_size: int) -> int:
        """The data-parallel size for a world; refuses a world the other axes do not divide, naming sizes that would work."""
        model_ranks = self.tp * self.pp * self.cp
        check(world_size % model_ranks == 0, "world size", world_size,
              f"tp·pp·cp = {model_ranks} does not divide it; start {model_ranks} ranks or a multiple, or {self._sizes_that_fit(world_size, model_ranks)}")
        dp = world_size // model_ranks
        check(self.dp in (0, dp), "world size", world_size,
              f"the layout dp={self.dp} tp={self.tp} pp={self.pp} cp={self.cp} needs {self.dp * model_ranks} ranks; set parallel.dp={dp} or start {self.dp * model_ranks}")
        fold = dp * self.cp * self.tp
        check(fold % self.ep == 0, "parallel.ep", self.ep, f"must divide dp·cp·tp = {fold}; choose one of {[d for d in range(1, fold + 1) if fold % d == 0]}")
        return dp

    def _sizes_that_fit(self, world_size: int, model_ranks: int) -> str:
        """For each axis above one, the sizes at which the product divides the world while the others stay."""
        options = []
        for axis in ("tp", "cp", "pp"):
            others = model_ranks // getattr(self, axis)
            sizes = [d for d in range(1, world_size // others + 1) if world_size % (others * d) == 0]
            if getattr(self, axis) > 1 and sizes:
                options.append(f"parallel.{axis}={sizes[0]}" if len(sizes) == 1 else f"parallel.{axis} one of {', '.join(map(str, sizes))}")
        return "set " + ", or ".join(options) if options else "shrink two of these axes"

