"""Builds and calls the KDA backward's kernels without the torch extension; holds no test of its own.

`simt_library` runs the kernel source on this CPU (csrc/kda_chunk/sm90_kda_chunk_bwd_simt.cuh), `gpu_library` on the current GPU.
Both have one C entry, so one `call` serves both, and `make_case`/`truth` give the same inputs and float64 gradients to both.
"""

import ctypes
import subprocess
from pathlib import Path

import torch

from megamoe.ops.kda_chunk.reference import kda_chunk as reference_chunk
from megamoe.ops.kda_chunk.reference import kda_recurrent

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "kda_chunk"
GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")
# RMS ratio against the float64 recurrence from the same bf16 inputs.
# dA_log of a head is ONE number, a sum of random sign over its tokens and channels, so its relative error is itself random (no single
# rounding dominates it: measured by leaving them out one by one). The ratio of LIMITS means something over many heads or a long stream.
DA_LOG_BY_HEADS = ((3, 5e-2), (16, 2e-2))  # below so many heads: this limit
LIMITS = dict(dq=8e-3, dk=8e-3, dv=8e-3, dg=1.5e-2, dbeta=1.5e-2, dA_log=8e-3, ddt_bias=8e-3, dinitial_state=8e-3)
GATES = {
    "uniform": lambda x: x,
    "slow": lambda x: 0.5 * x - 6.2,
    "saturated": lambda x: 0.5 * x + 9,
    "alternating": lambda x: 0.1 * x + torch.where(torch.arange(128) % 2 == 0, 8.0, -8.0),
    "spikes": lambda x: torch.where(x.abs() > 2.5, 8.0, -6.0) + 0.1 * x,
}


SEGMENT = 128  # rows between two cuts in the CPU build (4,096 on the card); num_sms >= 11 * H cuts


def simt_library(folder) -> ctypes.CDLL:
    out = Path(folder) / "kda_bwd_simt.so"
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DMEGAMOE_SIMT_EMULATION", f"-DMEGAMOE_KDA_SEGMENT_ROWS={SEGMENT}", "-x", "c++"]
    subprocess.run(["g++", *flags, str(SOURCE / "sm90_kda_chunk_bwd_driver.cu"), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def gpu_library(folder, extra=()) -> ctypes.CDLL:
    out = Path(folder) / "kda_bwd_gpu.so"
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-lineinfo", "-Xcompiler", "-fPIC", "-shared", *extra]
    subprocess.run(["nvcc", *flags, str(SOURCE / "sm90_kda_chunk_bwd_driver.cu"), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def make_case(T, H, gate="uniform", cu=None, seed=0, states=True, beta_dtype=torch.float32, a_log=0.3):
    """bf16 inputs of one call on the CPU. cu: list of document starts, or None."""
    gen = torch.Generator().manual_seed(seed)
    n = lambda *s: torch.randn(*s, generator=gen)  # noqa: E731
    N = 1 if cu is None else len(cu) - 1
    case = dict(q=n(T, H, 128), k=n(T, H, 128), v=n(T, H, 128), g=GATES[gate](n(T, H, 128)), do=n(T, H, 128))
    case = {name: x.bfloat16() for name, x in case.items()}
    case["beta"] = n(T, H).to(beta_dtype)
    case["A_log"], case["dt_bias"] = a_log * n(H), 0.3 * n(H, 128)
    case["initial_state"], case["dfinal"] = (0.1 * n(N, H, 128, 128), 0.1 * n(N, H, 128, 128)) if states else (None, None)
    case["cu"] = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    return case


def truth(case, lower_bound=-5.0, dtype=torch.float64, recurrent=True):
    """The eight gradients by autograd, of the token recurrence (or of the chunked reference, for long streams)."""
    op = kda_recurrent if recurrent else reference_chunk
    leaves = {name: case[name].to(dtype).detach().requires_grad_() for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    start = None if case["initial_state"] is None else case["initial_state"].to(dtype).detach().requires_grad_()
    o, final = op(*(leaves[x] for x in ("q", "k", "v", "g", "beta")), A_log_H=leaves["A_log"], dt_bias_HK=leaves["dt_bias"], lower_bound=lower_bound,
                  cu_seqlens=case["cu"], initial_state_NHKV=start, output_final_state=True)  # fmt: skip
    loss = (o * case["do"].to(dtype)).sum()
    if case["dfinal"] is not None:
        loss = loss + (final * case["dfinal"].to(dtype)).sum()
    wrt = [*leaves.values()] + ([] if start is None else [start])
    return dict(zip(GRADS, torch.autograd.grad(loss, wrt)))


def call(lib, case, lower_bound=-5.0, num_sms=132, stream=0, keep=None):
    """Run the kernels on tensors of one device. Outputs and the workspace start as NaN. Returns the gradients."""
    T, H, _ = case["q"].shape
    N = 1 if case["cu"] is None else case["cu"].numel() - 1
    device = case["q"].device
    if keep is None:
        keep = allocate(lib, case, num_sms)
    x = [case[name] for name in ("q", "k", "v", "g", "do", "beta", "A_log", "dt_bias", "initial_state", "dfinal", "cu")]
    x += [keep[name] for name in GRADS] + [keep["workspace"]]
    for tensor in x:
        assert tensor is None or (tensor.is_contiguous() and tensor.device == device)
    pointers = (ctypes.c_void_p * len(x))(*[None if t is None else t.data_ptr() for t in x])
    dims = (ctypes.c_int64 * 5)(T, H, N, case["beta"].dtype == torch.float32, num_sms)
    scalars = (ctypes.c_double * 2)(128**-0.5, lower_bound)
    status = lib.kda_bwd(pointers, dims, scalars, ctypes.c_void_p(stream))
    if status:
        raise RuntimeError(f"kda_bwd returned CUDA error {status}")
    return {name: keep[name] for name in GRADS if keep[name] is not None}


def workspace_bytes(lib, T, H, N, num_sms):
    lib.kda_bwd_workspace_bytes.restype = ctypes.c_int64
    lib.kda_bwd_workspace_bytes.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return lib.kda_bwd_workspace_bytes(T, H, N, num_sms)


def allocate(lib, case, num_sms=132):
    T, H, _ = case["q"].shape
    N = 1 if case["cu"] is None else case["cu"].numel() - 1
    like = dict(dq=case["q"], dk=case["k"], dv=case["v"], dg=case["g"], dbeta=case["beta"], dA_log=case["A_log"], ddt_bias=case["dt_bias"], dinitial_state=case["initial_state"])
    out = {name: None if x is None else torch.full_like(x, float("nan")) for name, x in like.items()}
    out["workspace"] = torch.full((workspace_bytes(lib, T, H, N, num_sms),), 0xFF, dtype=torch.uint8, device=case["q"].device)
    return out


def outside_limits(got, want):
    """Names of the gradients that break the protocol, with their errors; empty when all hold."""
    heads = want["dA_log"].numel()
    limits = LIMITS | next((dict(dA_log=limit) for few, limit in DA_LOG_BY_HEADS if heads < few), {})
    found = errors(got, want)
    return {name: f"RMS ratio {rms:.2e} (limit {limits[name]:.0e}), largest {peak:.2e} of the maximum" for name, (rms, peak) in found.items() if not (rms <= limits[name] and peak <= 0.05)}


def errors(got, want):
    """name -> (RMS ratio, largest error over the tensor's largest value); NaN counts as infinite."""
    result = {}
    for name, x in got.items():
        y, x = want[name].double().cpu(), x.double().cpu()
        bad = float("inf") if not torch.isfinite(x).all() else 0.0
        peak = y.abs().max().clamp_min(1e-300)
        result[name] = ((x - y).norm().item() / y.norm().clamp_min(1e-300).item() + bad, ((x - y).abs().max() / peak).item() + bad)
    return result
