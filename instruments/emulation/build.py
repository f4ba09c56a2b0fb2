"""Builds what stands in for CUDA, cuBLAS and NCCL, once for all tests, into build/emulation."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "emulation"
CUDA = FOLDER / "libcuda.so.1"
NCCL = FOLDER / "libnccl.so.2"
CUBLAS = FOLDER / "libcublas.so.13"
SOURCES = {
    CUDA: [f"emulation/{name}.cpp" for name in ("blocks", "runtime", "devices", "memory", "graphs", "driver")],
    NCCL: ["fake_nccl.cpp"],
    CUBLAS: ["fake_cublas.cpp"],
}
# As in the product: no contraction into FMA.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Of kernels: an access that is not aligned, as to 16 bytes, ends the process, as it ends the kernel on a GPU.
KERNEL_FLAGS = ("-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error")


@functools.cache
def build() -> Path:
    """Compile what has changed; the folder. Once in a process. Safe to call from several processes at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for library, sources in SOURCES.items():
        paths, headers = [HERE / source for source in sources], [*HERE.rglob("*.h"), *(ROOT / "csrc/nccl").glob("*.h")]
        digest, stamp = _digest([*paths, *headers]), library.with_suffix(".sources")
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.exists() or stamp.read_text() != digest:
                warnings = ("-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}", "-pthread")
                if error := _compile(library, *warnings, *map(str, paths), "-ldl"):
                    raise RuntimeError(f"{library.name} cannot be compiled:\n{error}")
                stamp.write_text(digest)
    _compile_kernels_of_the_product()
    return FOLDER


@functools.cache
def torch_gpu() -> Path:
    """Compile the devices of `torch_gpu.py` against the PyTorch that is installed; the library."""
    source, root = HERE / "torch_gpu.cpp", Path(importlib.util.find_spec("torch").origin).parent  # it is not imported
    digest = _digest([source, ROOT / "csrc/nccl/driver.h"])[:16]
    library = FOLDER / f"libtorch_gpu-{digest}-{importlib.metadata.version('torch')}.so"
    folders = root / "include", root / "include" / "torch" / "csrc" / "api" / "include"
    options = (
        "-std=c++20",
        "-O0",
        *(f"-isystem{folder}" for folder in folders),
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
    )
    if error := compile_once(library, *options, str(source), "-ltorch_cpu", "-lc10"):
        raise RuntimeError(f"{source.name} cannot be compiled:\n{error}")
    return library


def _compile_kernels_of_the_product() -> None:
    """All kernels, so that no test waits for the compiler while it is timed."""
    paths = [path for path in (ROOT / "distopt" / "kernels" / "cuda").iterdir() if path.is_file()]
    digest, stamp = _digest(paths), kernels() / "sources"
    if not stamp.exists() or stamp.read_text() != digest:
        command = [sys.executable, "-m", "instruments.emulation.compile_kernels"]
        subprocess.run(command, cwd=ROOT, check=True)
        stamp.write_text(digest)


def kernels() -> Path:
    """The folder of kernels that were compiled with the headers as they are."""
    return FOLDER / "kernels" / _digest([*HERE.rglob("*.h"), Path(__file__)])


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def compile_kernels(text: str, options: Iterable[str], library: Path) -> str:
    """Compile kernels as a shared library, unless there is one. What the compiler says where it fails, or nothing."""
    return compile_once(library, *KERNEL_FLAGS, *options, "-xc++", "-", text=text)


def compile_once(library: Path, *arguments: str, text: str = "") -> str:
    """Compile a library, unless there is one; as `compile_kernels`."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return "" if library.exists() else _compile(library, *arguments, text=text)


def _compile(library: Path, *arguments: str, text: str = "") -> str:
    new = library.with_suffix(".new")
    command = [_tool("c++"), *FLAGS, f"-I{HERE}", f"-I{ROOT / 'csrc'}", "-o", str(new), *arguments]
    ended = subprocess.run(command, input=text, capture_output=True, text=True)
    if ended.returncode:
        return ended.stderr
    new.rename(library)
    return ""


def _tool(name: str) -> str:
    beside = str(Path(sys.executable).parent)  # the virtual environment's, even if it is not activated
    if found := shutil.which(name, path=beside) or shutil.which(name):
        return found
    raise FileNotFoundError(f"the emulator needs {name}; pip install {name}")


if __name__ == "__main__":
    print(build())
