"""The tests of a GPU that need no driver, on the emulated one, in a process that takes it for the real one."""

import os
import sys

import pytest

from instruments.emulation import build
from tests.processes import Program

RUN = "import sys, pytest; from instruments.emulation import activate; activate(); sys.exit(pytest.main(sys.argv[1:]))"

NO_CASES = 5  # the exit code of pytest where a part has none
FILES = ("ops", "convolution", "codec_kernels", "kernels", "tensor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["quick", *(pytest.param(part, marks=pytest.mark.sweep) for part in ("rest", "sweeps"))]
)
@pytest.mark.parametrize("name", FILES)
def test_on_the_emulated_gpu(name, part):
    """The emulator takes minutes for all cases of some files."""
    run(f"test_{name}.py", "--part", part)


@pytest.mark.parametrize("file", ["test_staging.py", pytest.param("test_tensor.py", marks=pytest.mark.slow)])
def test_where_operations_lag(file):
    """CuPy's operations wait on their streams, as kernels do, so that a missing event shows."""
    run(file, DISTOPT_EMULATED_LAG="1")


def run(file, *options, **more):
    build.build()
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "DISTOPT_DEVICE": "cuda", **more}
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}", *options]
    ended = Program(command, {**environment, "PATH": os.environ["PATH"]}).end()
    assert ended.code in (0, NO_CASES if "--part" in options else 0), ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout
