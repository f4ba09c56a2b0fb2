"""Builds what stands in for CUDA, cuBLAS and NCCL, once for all tests, into build/emulation."""

from __future__ import annotations

import fcntl
import functools
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "emulation"
NCCL = FOLDER / "libnccl.so.2"
CUBLAS = FOLDER / "libcublas.so"


def cuda_module() -> Path:
    """The emulated `_cuda`."""
    found = sorted(FOLDER.glob("_cuda.*.so"))
    if not found:
        raise FileNotFoundError(f"nothing is built in {FOLDER}; call tests.emulation.build.build() before")
    return found[0]


@functools.cache
def build() -> Path:
    """Compile what has changed; the folder. Once in a process. Safe to call from several processes at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_cuda()
        _build_library(NCCL, "fake_nccl", ROOT / "csrc" / "nccl" / "api.h")
        _build_library(CUBLAS, "fake_cublas", ROOT / "csrc" / "cuda" / "cublas_api.h")
    return FOLDER


def _build_cuda() -> None:
    cmake = _tool("cmake")
    if not (FOLDER / "build.ninja").exists():
        options = {
            "DISTOPT_CUDA": "EMULATED",
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_UNITY_BUILD": "ON",  # nanobind's headers once for several files: three quarters of the time
            "CMAKE_MAKE_PROGRAM": _tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
        }
        _run(cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(FOLDER), *(f"-D{key}={options[key]}" for key in options))
    _run(cmake, "--build", str(FOLDER), "--target", "_cuda")


def _build_library(library: Path, name: str, header: Path) -> None:
    here = Path(__file__).parent
    sources = [*here.glob(f"{name}*"), header]
    if library.exists() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{here}", f"-I{ROOT / 'csrc'}"]
    new = library.with_suffix(".new")
    _run(_tool("c++", "g++"), *flags, "-o", str(new), str(here / f"{name}.cpp"), "-ldl")
    new.rename(library)


def _tool(*names: str) -> str:
    beside = str(Path(sys.executable).parent)  # the virtual environment's, even if it is not activated
    for name in names:
        if found := shutil.which(name, path=beside) or shutil.which(name):
            return found
    raise FileNotFoundError(f"the emulator needs {' or '.join(names)}; pip install {names[0]}")


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout}\n{ended.stderr}")


if __name__ == "__main__":
    print(build())
