"""The functions of NVIDIA's libraries and of UCX are called as their headers declare them, where they are installed."""

import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The part of CUDA's header that nccl.h uses.
CUDA_RUNTIME = """\
#include <cstddef>
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
#define __CUDA_BF16_TYPES_EXIST__
"""


def installed(header: str) -> list[Path]:
    """The folders of a header in the packages of NVIDIA and of UCX, of every version of CUDA that is installed."""
    found = (
        Path(str(file.locate())).parent
        for package in distributions()
        if package.metadata["Name"].startswith(("nvidia-", "libucx-"))
        for file in package.files or ()
        if file.name == header
    )
    return sorted({folder.resolve() for folder in found if folder.is_dir()})


def compiles(source: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    include = [f"-I{folder}" for folder in (ROOT / "csrc", *folders)]
    command = ["c++", "-std=c++17", "-fsyntax-only", *include, str(ROOT / "tests" / "unit" / "abi" / source)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(("source", "header"), [("driver.cpp", "cuda.h"), ("nccl.cpp", "nccl.h"), ("ucx.cpp", "ucp.h")])
def test_declarations_are_those_of_the_header(tmp_path: Path, source: str, header: str) -> None:
    folders = installed(header)
    if not folders:
        pytest.skip(f"no package with {header} is installed")
    (tmp_path / "cuda_runtime.h").write_text(CUDA_RUNTIME)
    (tmp_path / "cuda_fp16.h").touch()
    (tmp_path / "cuda_bf16.h").touch()
    for folder in folders:
        ended = compiles(source, tmp_path, folder, *folder.parents[:2])  # UCX's headers include ucs/...
        assert ended.returncode == 0, f"{folder}:\n{ended.stderr}"
