"""Errors of cuBLAS, as it is loaded and called."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.emulation import build

PROLOGUE = """
import os
from tests.emulation import activate
activate()
import cupy
from distopt.nn.numerics.gpu_base import product
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    build.build()
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(code)]
    return subprocess.run(command, cwd=build.ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("handle", "told"),
    [("0", "libcublas.so.13: cannot open"), ("property(lambda _: __import__('libcublas'))", "No module")],
)
def test_a_cupy_without_that_cublas_is_an_error_with_a_cure(handle: str, told: str) -> None:
    ended = run(
        f"""
        cupy.cuda.Device.cublas_handle = {handle}
        product(cupy.ones((2, 3), "float32"), cupy.ones((3, 4), "float32"))
        """
    )
    line = ended.stderr.splitlines()[-1]
    assert f"MissingDependencyError: products need the cuBLAS of CuPy's CUDA ({told}" in line
    assert "cuda13" in line


def test_errors_of_cublas_are_named() -> None:
    ended = run(
        """
        from distopt.nn.numerics import gpu_base
        gpu_base._WORKSPACE_BYTES = 0
        product(cupy.ones((2, 2), "float32"), cupy.ones((2, 2), "float32"))
        """
    )
    assert "cublasSgemm_v2: CUBLAS_STATUS_EXECUTION_FAILED (cuBLAS status 13)" in ended.stderr
