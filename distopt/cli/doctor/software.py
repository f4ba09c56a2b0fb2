"""Probes of Python, NumPy, its BLAS, and the native module."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from ...errors import DistoptError
from ...settings import Settings
from .ask import ask, version_of
from .report import Finding, absent, failed, ok

__all__ = ["blas", "core", "numpy", "operating_system", "packages", "python", "settings"]

_REQUIRED = ("numpy", "safetensors", "threadpoolctl", "tqdm")

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The processor flags that OpenBLAS's SkylakeX kernels need.
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
# Kernel sets of OpenBLAS without 512-bit vectors.
_AVX2_KERNELS = ("Haswell", "Zen")
_WORTHWHILE = 1.1


def python() -> Finding:
    """The interpreter."""
    found = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    return ok(found, version=platform.python_version(), executable=sys.executable)


def operating_system() -> Finding:
    """The operating system, which must be Linux."""
    libc = " ".join(platform.libc_ver())
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {libc or 'unknown C library'}"
    if sys.platform != "linux":
        return failed(found, "use Linux: shared memory between ranks relies on memfd, futexes and /proc")
    return ok(found, system=platform.system(), release=platform.release(), machine=platform.machine(), libc=libc)


def settings() -> Finding:
    """The DISTOPT_* variables."""
    given = {name: value for name, value in os.environ.items() if name.startswith("DISTOPT_")}
    try:
        Settings.from_env()
    except DistoptError as error:
        return failed(str(error), "correct or unset it", **given)
    return ok(" ".join(f"{name}={value}" for name, value in given.items()) or "no DISTOPT_* variable is set", **given)


def packages() -> Finding:
    """The packages that distopt requires."""
    versions: dict[str, str | None] = {name: version_of(name) for name in _REQUIRED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return failed(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}", **versions)
    return ok(", ".join(f"{name} {found}" for name, found in versions.items()), **versions)


def numpy() -> Finding:
    """Whether NumPy can be imported."""
    try:
        answer = ask("numpy")
    except (ImportError, DistoptError) as error:
        return failed(str(error), "pip install --force-reinstall numpy")
    return ok(f"{answer['version']}, {answer['path']}", version=answer["version"], path=answer["path"])


def blas() -> Finding:
    """The library behind NumPy's matrix products, and whether it uses the processor's vector instructions."""
    try:
        answer = ask("blas")
    except (ImportError, DistoptError) as error:
        return absent(f"unknown: {error}")
    library = answer["library"]
    if library is None:
        return absent(f"built with {answer['built_with'] or 'an unknown library'}, which threadpoolctl does not know")
    kernels = library.get("architecture", "")
    capped = [f"{name}={os.environ[name]}" for name in _THREAD_VARIABLES if name in os.environ]
    found = f"{library['internal_api']} {library['version']}" + (f", {kernels} kernels" if kernels else "")
    found += f", threads: {library['num_threads']}" + (f" ({' '.join(capped)})" if capped else "")
    cure, speeds = "", {}
    if library["internal_api"] == "openblas" and kernels in _AVX2_KERNELS and processor_flags() >= _AVX512:
        speeds = {kernels: ask("gemm")["gflops"], "SkylakeX": _skylakex_speed()}
        if speeds["SkylakeX"] > _WORTHWHILE * speeds[kernels]:
            cure = (
                "export OPENBLAS_CORETYPE=SkylakeX before Python starts: this processor has AVX-512, and a float32 "
                f"matrix product on one thread ran at {speeds['SkylakeX']:.0f} GFLOP/s with it, at "
                f"{speeds[kernels]:.0f} without"
            )
    return ok(found, cure, **library, gflops=speeds)


def _skylakex_speed() -> float:
    try:
        speed: float = ask("gemm", variable="OPENBLAS_CORETYPE=SkylakeX")["gflops"]
    except DistoptError:  # this OpenBLAS build lacks the kernels, or the hypervisor blocks them
        return 0.0
    return speed


def processor_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature flags of the first processor; empty if not reported."""
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def core() -> Finding:
    """The native module: compiler, flags, instruction sets."""
    try:
        answer = ask("core")
    except (ImportError, DistoptError) as error:
        return failed(
            str(error), "build it: pip install --force-reinstall distopt, or pip install -e . in the source tree"
        )
    isas = ", ".join(f"[{isa}]" if isa == answer["isa"] else isa for isa in answer["isas"])
    return ok(f"{answer['compiler']}, {answer['flags']}; instruction sets: {isas}", **answer)
