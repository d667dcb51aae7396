"""The AdamW side of a step behind one interface: DeepSpeed (ZeRO-1) and a plain twin that works in any dtype.

Both are called the same way, once per micro-batch and once per step:

    with engine.micro_batch():
        loss.backward()                     # loss already divided by the step's global token count
    engine.reduce()                         # sum over the engine's axis
    share = engine.squared_norm()           # sums over the world to the norm², see `optim/optimizer.py`
    engine.step(lr, grad_scale, row_factors)        # or engine.discard()

An engine serves the parameters of one mesh axis: ranks that hold the same slice and each a part of its gradient. A layout
with tensor or expert parallelism has an engine per such axis, each an ordinary data-parallel one. So DeepSpeed needs to
know of no tensor, pipeline or expert parallelism at all: it is told of a data group and of a model group of one rank,
no two stages need the same parameter groups, and no parameter needs a flag to be counted once in a norm.

Sums, not averages, leave `reduce`: DeepSpeed divides by its data-parallel size, and that factor is cancelled here and
nowhere else. The engines never see Muon's parameters (`optim/muon.py`). Every private name of DeepSpeed 0.19.8 that
the project touches is in this file; `tests/parallel/test_engine.py` compares the two engines.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megamoe.parallel.mesh import Axis

ParamGroups = list[dict]
# (rows,) factors of a matrix's rows, by parameter: applied to updated masters before weights are made from them.
RowFactors = dict[nn.Parameter, torch.Tensor]
# Names of AdamW's state in torch and in apex.
ADAM_STATE = ("exp_avg", "exp_avg_sq")


class StateFragment(NamedTuple):
    """A run of elements of one parameter's optimizer state, where it lives.

    Attributes:
        key: `master` (a wide copy of the weight), `exp_avg`, `exp_avg_sq`, `momentum`.
        first: first element within the parameter as this rank holds it, row-major.
        values: (n,) live, in the state's dtype.
        replicated: every rank of the parameter's reduction axis holds the same; else no two hold the same element.
    """

    param: nn.Parameter
    key: str
    first: int
    values: torch.Tensor
    replicated: bool = False


class PlainEngine:
    """Own sum reduction and a torch optimizer; no sharding. The float64 oracle of `DeepSpeedEngine`.

    Args:
        groups: torch optimizer param groups; parameters may live anywhere in the model.
        make_optimizer: builds the torch optimizer from the groups.
        axis: gradients are summed over it.
    """

    name = "plain"

    def __init__(self, groups: ParamGroups, make_optimizer: Callable[[ParamGroups], torch.optim.Optimizer], axis: Axis):
        self.optimizer = make_optimizer(groups)
        self.params = [p for g in groups for p in g["params"]]
        self.axis = axis

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        yield

    def reduce(self) -> None:
        """Sum every gradient over the axis, in one buffer per dtype. Collective, also for parameters without a gradient."""
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.axis.group is None:
            return
        for dtype in sorted({p.dtype for p in self.params}, key=str):
            grads = [p.grad for p in self.params if p.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat, group=self.axis.group)
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view_as(g))

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the sum of squares of the reduced gradients, float64 scalar: every rank of the axis holds them all."""
        return torch.stack([p.grad.double().square().sum() for p in self.params]).sum() / self.axis.size

    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, int, torch.Tensor]]:
        """(parameter, first element, values) of every reduced gradient held here, flat. For proofs."""
        for p in self.params:
            yield p, 0, p.grad.reshape(-1)

    def step(self, lr: float, grad_scale: torch.Tensor, row_factors: RowFactors | None = None) -> None:
        for p in self.params:
            p.grad.mul_(grad_scale.to(p.grad.dtype))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for p in self.params:
            if row_factors and p in row_factors:
                p.data.mul_(row_factors[p].to(p.dtype)[:, None])
        self.discard()

    def discard(self) -> None:
        """Drop the gradients of this step; parameters and state stay as they are."""
        for p in self.params:
            p.grad = None

    def adam_step(self) -> int | None:
        """AdamW's own step count; None before its first step, and without AdamW. May sync the host."""
        return _adam_step(self.optimizer)

    def create_state(self, adam_step: int) -> None:
        """Make the state that the optimizer makes in its first step, zero, as after so many. Parameters keep their values."""
        _create_state(self.optimizer, adam_step)

    def state_fragments(self) -> Iterator[StateFragment]:
        """Optimizer state of every parameter; the parameters are the masters themselves."""
        for p in self.params:
            for key in ADAM_STATE:
                if key in self.optimizer.state.get(p, {}):
                    yield StateFragment(p, key, 0, self.optimizer.state[p][key].view(-1), replicated=True)


class DeepSpeedEngine:
    """One base `deepspeed.DeepSpeedEngine` in ZeRO stage 1, its module never called through it.

    Calling the module directly and reducing once per step keeps the engine's hooks out of our schedules. fp32 masters
    and Adam states are sharded over the axis; with bf16 parameters gradients accumulate in fp32.

    Args:
        groups, make_optimizer, axis: as for `PlainEngine`. Every group must hold one dtype.
        bf16: parameters of the groups are bf16 (some groups may stay fp32).
        bucket_elements: size of a reduction bucket.
    """

    name = "deepspeed"

    def __init__(self, groups: ParamGroups, make_optimizer: Callable[[ParamGroups], torch.optim.Optimizer], axis: Axis, *, bf16: bool, bucket_elements: int):
        import deepspeed

        self.axis = axis
        self._scale = torch.ones(())
        optimizer = make_optimizer(groups)
        optimizer.register_step_pre_hook(self._scale_gradients)
        # Between the update of the masters and DeepSpeed's copy of them into the weights.
        optimizer.register_step_post_hook(self._scale_rows)
        self._row_factors: RowFactors = {}
        view = _ParameterView([p for g in groups for p in g["params"]])
        # Its bf16 optimizer prints three lines of memory figures a parameter group, whatever the log level.
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, *_ = deepspeed.initialize(model=view, optimizer=optimizer, mpu=_Mpu(axis), config=_config(bf16, bucket_elements))
        self.engine.set_gradient_accumulation_boundary(False)
        # BF16_Optimizer accumulates into fp32 buffers of its own; DeepSpeedZeroOptimizer uses param.grad.
        self._accumulates_apart = hasattr(self.engine.optimizer, "update_hp_grads")
        self._places = self._find_places()

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Wrap exactly one backward: low-precision gradients are folded into the fp32 ones when it ends."""
        if self._accumulates_apart:
            self.engine.optimizer.clear_lp_grads(set_to_none=True)
        yield
        if self._accumulates_apart:
            self.engine.optimizer.update_hp_grads()
            self.engine.optimizer.clear_lp_grads(set_to_none=True)

    def reduce(self) -> None:
        """Average over the axis (DeepSpeed's way; the factor comes back in `squared_norm` and `step`). Collective."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the sum of squares of the summed gradients, float64 scalar. Collective over the axis."""
        optimizer = self.engine.optimizer
        if self._accumulates_apart:
            from deepspeed.runtime.utils import get_global_norm_of_tensors

            norm = get_global_norm_of_tensors(optimizer.get_grads_for_norm()[0], mpu=optimizer.mpu)
        else:
            norm = optimizer.scaled_global_norm()
        norm = torch.as_tensor(norm, dtype=torch.float64)
        # DeepSpeed masks a norm that is not finite with -1; squared, that would pass for a small gradient.
        norm = torch.where(norm < 0, torch.inf, norm)
        return (norm * self.axis.size).square() / self.axis.size

    def step(self, lr: float, grad_scale: torch.Tensor, row_factors: RowFactors | None = None) -> None:
        self._scale = grad_scale * self.axis.size
        self._row_factors = row_factors or {}
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        self.engine.set_gradient_accumulation_boundary(False)

    def discard(self) -> None:
        """Drop the gradients of this step; parameters and state stay as they are."""
        optimizer = self.engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        if not self._accumulates_apart:
            for index in optimizer.averaged_gradients:
                optimizer.averaged_gradients[index] = None
        self.engine.set_gradient_accumulation_boundary(False)

    def _scale_gradients(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self._scale.to(p.grad.dtype))

    def _scale_rows(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        # DeepSpeed may step its groups one by one: only those of this call.
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p, factor_R in self._row_factors.items():
            for flat, here, first, count in self._places.get(p, ()):
                if id(flat) in stepped:
                    index = torch.arange(first, first + count, device=flat.device) // p.shape[1]
                    flat.data.narrow(0, here, count).mul_(factor_R.to(flat.dtype)[index])

    def _find_places(self) -> dict[nn.Parameter, list[tuple[torch.Tensor, int, int, int]]]:
        """Where each parameter lies in this rank's flat masters: (flat, first element there, first element of the parameter, count).

        Read off the addresses: DeepSpeed reorders and aligns what it flattens, but parameters are views of the flat weights,
        whose partitions and masters correspond element by element.
        """
        optimizer = self.engine.optimizer
        parts = optimizer.bf16_partitioned_groups if self._accumulates_apart else optimizer.parallel_partitioned_bit16_groups
        places: dict[nn.Parameter, list[tuple[torch.Tensor, int, int, int]]] = {}
        for part, process_group, flat in zip(parts, optimizer.real_dp_process_group, self._partitions(), strict=True):
            weights = part[dist.get_rank(process_group)]
            for p in self.engine.module.params:
                if p.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
                    continue
                offset = p.storage_offset() - weights.storage_offset()
                first, stop = max(0, -offset), min(p.numel(), weights.numel() - offset)
                if first < stop:
                    places.setdefault(p, []).append((flat, offset + first, first, stop - first))
        return places

    def _partitions(self) -> list[torch.Tensor]:
        optimizer = self.engine.optimizer
        return optimizer.fp32_groups_flat_partition if self._accumulates_apart else optimizer.single_partition_of_fp32_groups

    def adam_step(self) -> int | None:
        """As `PlainEngine.adam_step`."""
        return _adam_step(self.engine.optimizer.optimizer)

    def create_state(self, adam_step: int) -> None:
        """As `PlainEngine.create_state`. No collective: DeepSpeed's own step is not run."""
        _create_state(self.engine.optimizer.optimizer, adam_step)

    def state_fragments(self) -> Iterator[StateFragment]:
        """fp32 masters and optimizer state of what this rank owns of each parameter.

        Whoever fills masters fills the parameters on every rank too: weights are made from masters in `step` only.
        """
        state = self.engine.optimizer.optimizer.state
        for p, places in self._places.items():
            for flat, here, first, count in places:
                yield StateFragment(p, "master", first, flat.detach().narrow(0, here, count))
                for key in ADAM_STATE:
                    if key in state.get(flat, {}):
                        yield StateFragment(p, key, first, state[flat][key].narrow(0, here, count))


def _adam_step(optimizer: torch.optim.Optimizer) -> int | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg" in state:
                # torch counts per parameter, apex per group.
                return int(state["step"] if "step" in state else group["step"])
    return None


def _create_state(optimizer: torch.optim.Optimizer, adam_step: int) -> None:
    # One step of rate zero on gradients of zero: whichever AdamW it is, the state is made where and as it wants it.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
        if "step" in group:
            group["step"] = adam_step
        for p in group["params"]:
            p.grad = None
            if "step" in optimizer.state.get(p, {}):
                optimizer.state[p]["step"].fill_(adam_step)


class _ParameterView(nn.Module):
    """All that DeepSpeed gets to see of the model: the parameters it optimises.

    DeepSpeed casts everything `parameters()` yields to bf16; parameters that must stay fp32 are left out of that
    call, and only of that call.
    """

    def __init__(self, params: list[nn.Parameter]):
        super().__init__()
        self.params = nn.ParameterList(params)

    def parameters(self, recurse: bool = True):
        kept = {id(p) for p in self.params if getattr(getattr(p, "megamoe", None), "keep_wide", False)}
        return (p for p in super().parameters(recurse) if id(p) not in kept)


class _Mpu:
    """What DeepSpeed asks about the layout: its data group is the engine's axis, everything else is one rank."""

    def __init__(self, axis: Axis):
        self._axis = axis
        # DeepSpeed wants a real group even of one rank. Only its member takes part in making it: stages may differ in
        # how many engines they have.
        me = dist.get_rank()
        self._solo = Axis(1, 0, (me,), dist.new_group([me], use_local_synchronization=True))
        if axis.group is None:
            self._axis = self._solo

    def get_data_parallel_group(self):
        return self._axis.group

    def get_data_parallel_world_size(self):
        return self._axis.size

    def get_data_parallel_rank(self):
        return self._axis.rank

    def get_data_parallel_group_ranks(self):
        return list(self._axis.ranks)

    def get_model_parallel_group(self):
        return self._solo.group

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_rank(self):
        return 0

    get_tensor_model_parallel_group = get_pipeline_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_pipeline_model_parallel_rank = get_model_parallel_rank


def _config(bf16: bool, bucket_elements: int) -> dict:
    """DeepSpeed's own configuration. Accumulation is ours (GAS 1), so are loss scale and clipping (both neutral)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": bucket_elements, "allgather_bucket_size": bucket_elements},
    }
    if bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
