"""Experts in Triton: SiTU-GLU inside the products, counts on the device, weight gradients summed in fp32.

Kept for backward: the rows, gate and up. The activation is recomputed while dout Wd is still in registers. A weight that
carries `main_grad` gets its gradient added there, without a bf16 copy in between, and autograd sees None for it: an fp32
tensor of its shape, or a tuple of fp32 (n, M, N) whose experts follow one another (an optimizer that shards experts over
owners keeps them in several places, see `optim/muon.py`), or a function that returns such a tuple and is called in backward
(gradients of borrowed experts have no memory before, see `moe_dispatch/balanced.py`). Tile sizes are chosen by rule, never by trial at run time: see `rules` and csrc/NOTES_MOE.md.

Letters: R rows, E experts here, D width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from megamoe.ops.grouped_mlp import triton_kernels as kernels
from megamoe.ops.mxfp4.triton import round_to

SLOTS_PER_PROGRAM = 32
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut: a BM x BN tile in steps of BK, `stages` copies ahead, `warps` of one program, programs an SM.

    group: row tiles that share a column of weights before the next column begins. parts: pieces in which `d_weight` adds.
    """

    BM: int
    BN: int
    BK: int
    stages: int
    warps: int
    per_sm: int = 1
    group: int = 12
    parts: int = 4
    max_registers: int | None = None

    def launch(self) -> dict:
        cut = dict(BM=self.BM, BN=self.BN, BK=self.BK, GROUP=self.group, num_stages=self.stages, num_warps=self.warps)
        return cut if self.max_registers is None else cut | dict(maxnreg=self.max_registers)


@dataclass(frozen=True)
class Rules:
    """The five tiles. The four row kernels share BM, since they share one plan."""

    up: Tile
    down: Tile
    d_hidden: Tile
    d_rows: Tile
    d_weight: Tile


def rules(R: int, E: int) -> Rules:
    """Tiles for R rows over E experts: what the host knows without reading the counts."""
    # Half a tile per expert is wasted on average: below about 1.5 tiles of rows, halving BM pays for its thinner products.
    if R < 192 * E:
        return Rules(
            up=Tile(64, 256, 64, 3, 8),
            down=Tile(64, 128, 64, 4, 4, per_sm=2),
            d_hidden=Tile(64, 128, 64, 3, 8, per_sm=2, max_registers=128),
            d_rows=Tile(64, 256, 64, 4, 8),
            d_weight=Tile(128, 128, 64, 3, 4, per_sm=2),
        )
    return Rules(
        up=Tile(128, 128, 64, 4, 8),
        down=Tile(128, 256, 64, 3, 8),
        d_hidden=Tile(128, 128, 64, 3, 8, per_sm=2, max_registers=128),
        d_rows=Tile(128, 256, 64, 4, 8),
        d_weight=Tile(128, 128, 64, 3, 4, per_sm=2),
    )


def grouped_mlp(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, *, act, act_beta=4.0, act_linear_beta=25.0, mxfp8_hidden=False):
    """See the contract in `megamoe.ops.grouped_mlp`. bf16 on a GPU. No host sync."""
    main_grads = tuple(getattr(w, "main_grad", None) for w in (w_gate_eFD, w_up_eFD, w_down_eDF))
    return _GroupedMLP.apply(rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, (act == "situ", act_beta, act_linear_beta), mxfp8_hidden, main_grads)


def why_not(*, device: str, dtype: torch.dtype, D: int, F: int, **_) -> str | None:
    """The reason these facts cannot be served, in words, or None."""
    if device != "cuda":
        return f"tensors are on {device}, not on a GPU"
    if dtype != torch.bfloat16:
        return f"takes bfloat16, got {dtype}"
    if D % 8 or F % 8:
        return f"widths must be multiples of 8 (16-byte rows), got {D} and {F}"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs compute capability 9.0 or newer (tensor-map copies)"
    return None


@dataclass
class Plan:
    """Prefix sums of `kernels.plan`, on the device, and the tiles they were made for."""

    row_start: torch.Tensor
    slot_start: torch.Tensor
    expert_of_slot: torch.Tensor
    R: int
    E: int
    rules: Rules
    programs: int

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.row_start, self.slot_start, self.expert_of_slot

    def grid(self, tile: Tile, columns: int) -> tuple[int]:
        """Enough programs for the most tiles that R rows of E experts can make, and no more than fit on the card at once."""
        most = (self.R // tile.BM + self.E) * triton.cdiv(columns, tile.BN)
        return (max(1, min(most, self.programs * tile.per_sm)),)


def make_plan(count_e: torch.Tensor, R: int, chosen: Rules | None = None) -> Plan:
    """Launch `kernels.plan`. The expert count of a launch is limited by the width of its one-program prefix sum."""
    E = count_e.shape[0]
    if E > MAX_EXPERTS:
        raise ValueError(f"grouped_mlp: {E} experts on one rank; the triton backend takes at most {MAX_EXPERTS}: use a larger ep or grouped_mlp=grouped_mm")
    chosen = chosen or rules(R, E)
    BM = chosen.up.BM
    programs = triton.cdiv(R // BM + E, SLOTS_PER_PROGRAM)
    row_start, slot_start = (torch.empty(E + 1, dtype=torch.int32, device=count_e.device) for _ in range(2))
    expert_of_slot = torch.empty(programs * SLOTS_PER_PROGRAM, dtype=torch.int32, device=count_e.device)
    kernels.plan[(programs,)](
        count_e, row_start, slot_start, expert_of_slot, E, BM=BM, BLOCK_E=triton.next_power_of_2(E), SLOTS=SLOTS_PER_PROGRAM
    )
    multiprocessors = torch.cuda.get_device_properties(count_e.device).multi_processor_count if count_e.is_cuda else 2
    return Plan(row_start, slot_start, expert_of_slot, R, E, chosen, multiprocessors)


def _tiles_of(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A tensor map over x with its leading dims flattened. Out-of-range parts of a tile read as zero."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns])


def up_fwd(plan: Plan, x_RD, w_gate_eFD, w_up_eFD, act, *, keep: bool):
    """Returns (hidden_RF, gate_RF, up_RF); the last two are None unless kept."""
    tile, F, D = plan.rules.up, w_gate_eFD.shape[1], x_RD.shape[1]
    hidden = x_RD.new_empty(plan.R, F)
    gate, up = (x_RD.new_empty(plan.R, F) if keep else None for _ in range(2))
    situ, beta, linear_beta = act
    kernels.up[plan.grid(tile, F)](
        _tiles_of(x_RD, tile.BM, tile.BK), _tiles_of(w_gate_eFD, tile.BN, tile.BK), _tiles_of(w_up_eFD, tile.BN, tile.BK),
        gate if keep else hidden, up if keep else hidden, hidden, *plan.tables, plan.E, F, D, beta, linear_beta,
        SITU=situ, APPROX=x_RD.is_cuda, SAVE=keep, **tile.launch(),
    )  # fmt: skip
    return hidden, gate, up


def down_fwd(plan: Plan, hidden_RF, w_down_eDF):
    """out_RD = hidden Wd^T; rows of no expert are zero."""
    tile, D, F = plan.rules.down, w_down_eDF.shape[1], w_down_eDF.shape[2]
    out = hidden_RF.new_empty(plan.R, D)
    kernels.nt[plan.grid(tile, D)](
        _tiles_of(hidden_RF, tile.BM, tile.BK), _tiles_of(w_down_eDF, tile.BN, tile.BK), out, *plan.tables, plan.E, D, F, **tile.launch()
    )
    _zero_rest(plan, out)
    return out


def hidden_bwd(plan: Plan, dout_RD, w_down_eDF, gate_RF, up_RF, act):
    """Returns (dgate_RF, dup_RF, hidden_RF)."""
    tile, D, F = plan.rules.d_hidden, w_down_eDF.shape[1], w_down_eDF.shape[2]
    dgate, dup, hidden = (torch.empty_like(gate_RF) for _ in range(3))
    situ, beta, linear_beta = act
    kernels.d_hidden[plan.grid(tile, F)](
        _tiles_of(dout_RD, tile.BM, tile.BK), _tiles_of(w_down_eDF, tile.BK, tile.BN), gate_RF, up_RF, dgate, dup, hidden,
        *plan.tables, plan.E, F, D, beta, linear_beta, SITU=situ, APPROX=gate_RF.is_cuda, **tile.launch(),
    )  # fmt: skip
    return dgate, dup, hidden


def rows_bwd(plan: Plan, dgate_RF, dup_RF, w_gate_eFD, w_up_eFD):
    """dx_RD; rows of no expert are zero."""
    tile, F, D = plan.rules.d_rows, w_gate_eFD.shape[1], w_gate_eFD.shape[2]
    dx = dgate_RF.new_empty(plan.R, D)
    kernels.d_rows[plan.grid(tile, D)](
        _tiles_of(dgate_RF, tile.BM, tile.BK), _tiles_of(w_gate_eFD, tile.BK, tile.BN),
        _tiles_of(dup_RF, tile.BM, tile.BK), _tiles_of(w_up_eFD, tile.BK, tile.BN), dx, *plan.tables, plan.E, D, F, **tile.launch(),
    )  # fmt: skip
    _zero_rest(plan, dx)
    return dx


def weight_bwd(plan: Plan, a_RM, b_RN, like_eMN, main_grad=None):
    """a_e^T b_e per expert, added to `main_grad` (returns None; one launch a run of experts) or in the weight's dtype."""
    tile, M, N = plan.rules.d_weight, a_RM.shape[1], b_RN.shape[1]
    a_tiles, b_tiles = _tiles_of(a_RM, tile.BK, tile.BM), _tiles_of(b_RN, tile.BK, tile.BN)
    add = main_grad is not None
    runs = (main_grad,) if isinstance(main_grad, torch.Tensor) else main_grad or (torch.empty_like(like_eMN),)
    first = 0
    for dw in runs:
        E = dw.shape[0]
        programs = min(E * triton.cdiv(M, tile.BM) * triton.cdiv(N, tile.BN), plan.programs * tile.per_sm)
        # Three dims, so that a tile that overhangs an expert's matrix is cut there and adds nothing to the next one's.
        dw_tiles = TensorDescriptor.from_tensor(dw, [1, tile.BM, tile.BN // tile.parts]) if add else b_tiles
        kernels.d_weight[(programs,)](
            a_tiles, b_tiles, dw_tiles, a_RM, b_RN, dw, plan.row_start[first:], E, M, N, ADD=add, PARTS=tile.parts, **tile.launch()
        )
        first += E
    assert first == plan.E, f"main_grad holds {first} experts of {plan.E}"
    return None if add else runs[0]


def _zero_rest(plan: Plan, out_RD) -> None:
    kernels.zero_rest[(triton.cdiv(plan.R, 64),)](out_RD, plan.row_start, plan.E, plan.R, out_RD.shape[1], ROWS=64, BLOCK=1024)


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, count_e, w_gate_eFD, w_up_eFD, w_down_eDF, act, mxfp8_hidden, main_grads):
        ctx.act, ctx.mxfp8_hidden, ctx.main_grads, ctx.plan = act, mxfp8_hidden, main_grads, None
        if rows_RD.shape[0] == 0:
            ctx.save_for_backward(rows_RD, w_gate_eFD, w_up_eFD, w_down_eDF)
            return torch.zeros_like(rows_RD)
        rows_RD = rows_RD.contiguous()
        weights = [w.contiguous() for w in (w_gate_eFD, w_up_eFD, w_down_eDF)]
        ctx.plan = make_plan(count_e, rows_RD.shape[0])
        hidden_RF, gate_RF, up_RF = up_fwd(ctx.plan, rows_RD, weights[0], weights[1], act, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(rows_RD, *weights, gate_RF, up_RF)
        if mxfp8_hidden:
            hidden_RF = round_to(hidden_RF, "mxfp8")
        return down_fwd(ctx.plan, hidden_RF, weights[2])

    @staticmethod
    def backward(ctx, dout_RD):
        need_rows, _, *need_w = ctx.needs_input_grad[:5]
        if ctx.plan is None:
            rows_RD, *weights = ctx.saved_tensors
            dws = [torch.zeros_like(w) if need and into is None else None for w, need, into in zip(weights, need_w, ctx.main_grads)]
            return torch.zeros_like(rows_RD), None, *dws, None, None, None
        rows_RD, w_gate_eFD, w_up_eFD, w_down_eDF, gate_RF, up_RF = ctx.saved_tensors
        dout_RD, plan, into = dout_RD.contiguous(), ctx.plan, [into() if callable(into) else into for into in ctx.main_grads]
        dgate_RF, dup_RF, hidden_RF = hidden_bwd(plan, dout_RD, w_down_eDF, gate_RF, up_RF, ctx.act)
        if ctx.mxfp8_hidden:
            hidden_RF = round_to(hidden_RF, "mxfp8")
        drows = rows_bwd(plan, dgate_RF, dup_RF, w_gate_eFD, w_up_eFD) if need_rows else None
        dw_gate = weight_bwd(plan, dgate_RF, rows_RD, w_gate_eFD, into[0]) if need_w[0] else None
        dw_up = weight_bwd(plan, dup_RF, rows_RD, w_up_eFD, into[1]) if need_w[1] else None
        dw_down = weight_bwd(plan, dout_RD, hidden_RF, w_down_eDF, into[2]) if need_w[2] else None
        return drows, None, dw_gate, dw_up, dw_down, None, None, None
