"""cuBLAS as it is loaded and called, by a stand-in that says what it was asked."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.emulation import build

PROLOGUE = """
import os
from tests.emulation import activate
activate()
import cupy
from distopt.nn.kernels.gpu_base import product
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    build.build()
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS", "CUPY_TF32")
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | env
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(code)]
    return subprocess.run(command, cwd=build.ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("setting", "mode"), [({}, 0), ({"CUPY_TF32": "0"}, 0), ({"CUPY_TF32": "1"}, 3)])
def test_tf32_is_used_on_request_alone(tmp_path: Path, setting: dict[str, str], mode: int) -> None:
    ended = run(
        """
        product(cupy.ones((2, 3), "float32"), cupy.ones((3, 4), "float32"))
        with cupy.cuda.Stream():
            product(cupy.ones((5, 3)), cupy.ones((5, 4)), a_transposed=True)
        """,
        FAKE_CUBLAS_RECORD=str(tmp_path / "record"),
        **setting,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "record").read_text().splitlines() == [f"2 4 3 mode {mode}", f"3 4 5 mode {mode}"]


@pytest.mark.parametrize(
    ("handle", "told"),
    [("0", "libcublas.so.13: cannot open"), ("property(lambda _: __import__('libcublas'))", "No module")],
)
def test_a_cupy_without_that_cublas_is_an_error_with_a_cure(handle: str, told: str) -> None:
    ended = run(
        f"""
        cupy.cuda.Device.cublas_handle = {handle}
        product(cupy.ones((2, 3)), cupy.ones((3, 4)))
        """
    )
    line = ended.stderr.splitlines()[-1]
    assert f"MissingDependencyError: products need the cuBLAS of CuPy's CUDA ({told}" in line
    assert "cuda13" in line


def test_errors_of_cublas_are_named() -> None:
    ended = run(
        """
        from distopt.nn.kernels import gpu_base
        gpu_base._WORKSPACE_BYTES = 0
        product(cupy.ones((2, 2)), cupy.ones((2, 2)))
        """
    )
    assert "cublasDgemm_v2: CUBLAS_STATUS_EXECUTION_FAILED (cuBLAS status 13)" in ended.stderr
