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
CUDA = FOLDER / "libcuda.so.1"
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
        cmake = _tool("cmake")
        if not (FOLDER / "build.ninja").exists():
            options = {
                "CMAKE_BUILD_TYPE": "Release",
                "CMAKE_UNITY_BUILD": "ON",  # nanobind's headers once for several files: three quarters of the time
                "CMAKE_MAKE_PROGRAM": _tool("ninja"),
                "Python_EXECUTABLE": sys.executable,
            }
            defined = (f"-D{key}={value}" for key, value in options.items())
            _run(cmake, "-G", "Ninja", "-S", str(Path(__file__).parent), "-B", str(FOLDER), *defined)
        _run(cmake, "--build", str(FOLDER))
    return FOLDER


def _tool(name: str) -> str:
    beside = str(Path(sys.executable).parent)  # the virtual environment's, even if it is not activated
    if found := shutil.which(name, path=beside) or shutil.which(name):
        return found
    raise FileNotFoundError(f"the emulator needs {name}; pip install {name}")


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout}\n{ended.stderr}")


if __name__ == "__main__":
    print(build())
