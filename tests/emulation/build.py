"""Builds what stands in for CUDA, cuBLAS and NCCL, once for all tests, into build/emulation."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "emulation"
CUDA = FOLDER / "libcuda.so.1"
NCCL = FOLDER / "libnccl.so.2"
CUBLAS = FOLDER / "libcublas.so"
# As in the product: no contraction into FMA.
KERNEL_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def kernels() -> Path:
    """The folder of kernels that were compiled with the headers as they are."""
    headers = sorted(Path(__file__).parent.rglob("*.h"))
    return FOLDER / "kernels" / hashlib.sha256(b"".join(path.read_bytes() for path in headers)).hexdigest()[:16]


def compile_kernels(text: str, library: Path) -> str:
    """Compile kernels as a shared library, unless there is one. What the compiler says where it fails, or nothing."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return ""
        new = library.with_suffix(".new")
        command = [_tool("c++"), *KERNEL_FLAGS, f"-I{Path(__file__).parent}", "-xc++", "-", "-o", str(new)]
        ended = subprocess.run(command, input=text, capture_output=True, text=True)
        if ended.returncode == 0:
            new.rename(library)
        return ended.stderr if ended.returncode else ""


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
