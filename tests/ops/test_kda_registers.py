"""The KDA kernels keep everything in registers: what the compiler reports for sm_90a, without a card.

Why it matters: a spill in a loop that runs once per 16 tokens costs memory traffic that no test of numbers sees, and a change
elsewhere in a kernel can bring one back. Not covered: speed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]  # as setup.py


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc (CUDA 13) on the PATH")
@pytest.mark.parametrize("source, kernels", [("kda_chunk/sm90_kda_chunk_fwd.cu", 5), ("kda_chunk/sm90_kda_chunk_bwd.cu", 7), ("kda_decode/smxx_kda_decode.cu", 1)])
def test_no_kernel_spills(source, kernels, tmp_path):
    done = subprocess.run(["nvcc", *FLAGS, str(CSRC / source), "-o", str(tmp_path / "kernels.cubin")], capture_output=True, text=True, check=True)
    report = re.findall(r"Function properties for (\S+)\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stdout + done.stderr)
    assert len(report) == kernels, report
    assert not [entry for entry in report if any(int(x) for x in entry[1:])]
