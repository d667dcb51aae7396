"""Time the routed experts of one K3 layer as an EP-8 rank sees them, beside a public Triton library, in one run.

    pip install liger-kernel; python tools/bench_moe_library.py [--json out.json]

Both take 8192 tokens of width 3584, 16 ids and weights each, 112 experts of width 3072, and return the weighted sums; both with
SwiGLU, since the library has no SiTU. Ours: dispatch, grouped MLP, combine (`triton` and torch's grouped_mm). The library:
`LigerFusedMoEFunction`, whose autotuner may choose among a few of its own configurations (all of them would take minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_moe import HEAD, RESULTS, ceilings, report, time_ms

from megamoe.ops.grouped_mlp import grouped_mm, triton
from megamoe.ops.moe_dispatch import combine, cuda
from megamoe.utils.errors import UserError

# Of its 32 and 16: what large Hopper tiles usually want. Its own default without autotuning is among them.
FORWARD = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 32, 8, 4)]
WEIGHTS = [(128, 128, 32, 8), (128, 128, 32, 4), (64, 128, 32, 8)]


def library():
    """`LigerFusedMoEFunction.apply` with its autotuners cut down."""
    try:
        from liger_kernel.ops import fused_moe, fused_moe_kernels
    except ImportError as error:
        raise UserError(f"tools/bench_moe_library.py: {error}: pip install liger-kernel (0.8.5 was used)") from None
    for kernel in vars(fused_moe_kernels).values():
        if len(getattr(kernel, "configs", ())) > 4:
            kept = [c for c in kernel.configs if (*(c.kwargs.get(k) for k in ("BLOCK_N", "BLOCK_K")), c.num_warps, c.num_stages) in FORWARD and "BLOCK_M" not in c.kwargs]
            kept += [c for c in kernel.configs if (*(c.kwargs.get(k) for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K")), c.num_warps) in WEIGHTS]
            kernel.configs = kept or kernel.configs[:4]
    return fused_moe.LigerFusedMoEFunction.apply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        liger = library()
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    cuda.load()
    N, E, A, D, F = 8192, 112, 16, 3584, 3072
    torch.manual_seed(0)
    x = torch.randn(N, D, device="cuda").bfloat16().requires_grad_()
    idx = torch.rand(N, E, device="cuda").topk(A, dim=1).indices
    weight = (torch.rand(N, A, device="cuda") / A).requires_grad_()
    ws = [torch.empty(E, *s, device="cuda", dtype=torch.bfloat16).normal_(std=s[1] ** -0.5).requires_grad_() for s in ((F, D), (F, D), (D, F))]
    gate_up = torch.cat([ws[0], ws[1]], 1).detach().requires_grad_()
    dy, flop = torch.randn_like(x), 6 * N * A * D * F

    def ours(mlp):
        rows, count, handle = cuda.dispatch(x, idx, weight, group=None, num_experts=E)
        return combine(mlp(rows, count, *ws, act="silu"), handle)

    calls = {
        "ours (triton)": (lambda: ours(triton.grouped_mlp), [x, weight, *ws]),
        "ours over torch grouped_mm": (lambda: ours(grouped_mm.grouped_mlp), [x, weight, *ws]),
        "liger-kernel fused MoE": (lambda: liger(x, gate_up, ws[2], idx.int(), weight), [x, weight, gate_up, ws[2]]),
    }
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    print(HEAD)
    ceilings()
    want = None
    for name, (call, leaves) in calls.items():
        with torch.no_grad():
            y = call().double()
            want = y if want is None else want
            off = ((y - want).norm() / want.norm()).item()
            assert off < 2e-2, f"{name} computes something else: {off:.3f}"
            report(f"routed experts {E}x{N * A // E}, {name}, fwd", time_ms(call, 5), flop, "TFLOP/s")
        report(f"routed experts {E}x{N * A // E}, {name}, fwd+bwd", time_ms(lambda: torch.autograd.grad(call(), leaves, dy), 3), 3 * flop, "TFLOP/s")
    if args.json:
        args.json.write_text(json.dumps(RESULTS, indent=1))


if __name__ == "__main__":
    main()
