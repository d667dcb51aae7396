"""Packaging, and the build of csrc/ into `megamoe._C`.

    pip install -e .                          no compiler, GPU or CUDA needed: without nvcc the extension is left out, and one line says so
    pip install -e . --no-build-isolation     the same, building against the torch of the current environment (recommended with nvcc)
    python setup.py build_ext --inplace       the extension alone

MEGAMOE_BUILD_CUDA = auto (default: build when nvcc is found) | 0 (never) | 1 (fail without nvcc).
MAX_JOBS bounds parallel compilers (default: all cores). Objects are kept in build/cuda, named by what went into them, so
that only changed files are compiled again. Kernels are torch-free and built for sm_90a alone; only csrc/ops*.cpp see torch's
headers, through the stable ABI, so one binary serves every torch from 2.11 on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MODE = os.environ.get("MEGAMOE_BUILD_CUDA", "auto")
TORCH_TARGET = "0x020b000000000000"  # 2.11: the oldest torch that the stable ABI of this binary asks for
ARCH = "-gencode=arch=compute_90a,code=sm_90a"
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", ARCH, "-Werror=all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror", "-Xptxas", "-v"]


def find_nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which(str(Path(home) / "bin" / "nvcc")) if home else None
    found = found or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return Path(found) if found else None


def find_torch() -> Path:
    """The torch package folder to build against, without importing it: pip's build isolation hides the one installed."""
    bases = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
    bases |= {str(Path(prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages") for prefix in (sys.prefix, sys.exec_prefix, os.environ.get("VIRTUAL_ENV", ""))}
    for base in sorted(bases):
        if base and (Path(base) / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return Path(base) / "torch"
    raise SystemExit(
        "megamoe: nvcc is here but no torch >= 2.11 is visible to build against; install torch first and use "
        "`pip install -e . --no-build-isolation`, or leave the CUDA extension out with MEGAMOE_BUILD_CUDA=0"
    )


def sources() -> list[Path]:
    """Kernels to compile. `*_driver.cu` are C entries for tests, not part of the extension."""
    kernels = [path for path in sorted(ROOT.glob("csrc/*/*.cu")) if not path.stem.endswith("_driver")]
    return [*kernels, *sorted(ROOT.glob("csrc/*.cpp"))]


class BuildCuda(build_ext):
    """Compile each source once per content, in parallel, and link; nvcc does both."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        assert nvcc is not None  # `extensions` has looked
        torch = find_torch()
        cache = ROOT / "build" / "cuda"
        cache.mkdir(parents=True, exist_ok=True)
        headers = hashlib.sha256()
        for path in sorted([*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh")]):
            headers.update(path.read_bytes())
        nvcc_version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout

        def compile_one(source: Path) -> Path:
            if source.suffix == ".cu":
                command = [str(nvcc), *NVCC_FLAGS]
            else:
                torch_include = torch / "include"
                system = [torch_include, torch_include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
                # nvcc hands a .cpp to the host compiler and knows where the CUDA headers are.
                command = [str(nvcc), "-std=c++20", "-O2", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *(f"-isystem={path}" for path in system)]
            key = hashlib.sha256("\0".join([*command, nvcc_version]).encode() + headers.digest() + source.read_bytes()).hexdigest()[:20]
            target = cache / f"{source.stem}-{key}.o"
            if target.exists():
                return target
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            done = subprocess.run([*command, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(partial)], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"megamoe: {source.relative_to(ROOT)} does not compile:\n{done.stdout}{done.stderr}")
            target.with_suffix(".log").write_text(done.stdout + done.stderr)  # registers and spills, as ptxas reports them
            partial.replace(target)
            return target

        jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, sources()))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # libtorch.so brings in the CUDA half of torch where there is one; no run path: `import torch` has loaded it by then.
        link = [str(nvcc), "-shared", ARCH, "-cudart", "static", "-o", str(output), *map(str, objects), f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch", "-Xlinker", "--allow-shlib-undefined"]
        subprocess.run(link, check=True)
        print(f"megamoe: built {output.name} from {len(objects)} objects for sm_90a against {torch}", file=sys.stderr)


def extensions() -> list[Extension]:
    if MODE not in ("auto", "0", "1"):
        raise SystemExit(f"megamoe: MEGAMOE_BUILD_CUDA={MODE!r} is unknown; use auto, 0 or 1")
    nvcc = find_nvcc()
    if MODE == "0" or (MODE == "auto" and nvcc is None):
        why = "MEGAMOE_BUILD_CUDA=0" if MODE == "0" else "no nvcc was found"
        print(f"megamoe: the CUDA extension is left out ({why}); with CUDA 13 build it by `pip install -e . --no-build-isolation`", file=sys.stderr)
        return []
    if nvcc is None:
        raise SystemExit("megamoe: MEGAMOE_BUILD_CUDA=1 but no nvcc was found; set CUDA_HOME or put nvcc on the PATH")
    return [Extension("megamoe._C", [str(path.relative_to(ROOT)) for path in sources()], py_limited_api=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCuda})
