"""The tests of a GPU that need no driver, on the emulated one, in a process that takes it for the real one."""

import os
import sys
from functools import partial

import pytest

from tests.emulation import build
from tests.processes import Program

RUN = "import sys, pytest; from tests.emulation import activate; activate(); sys.exit(pytest.main(sys.argv[1:]))"

slow = partial(pytest.param, marks=pytest.mark.slow)
sweep = partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.sweep])


@pytest.mark.parametrize(
    "file",
    [
        slow("test_ops.py"),
        sweep("test_convolution.py"),
        slow("test_codec_kernels.py"),
        slow("test_functions.py"),
        slow("test_kernels.py"),
        slow("test_tensor.py"),
    ],
)
def test_on_the_emulated_gpu(file):
    run(file)


@pytest.mark.parametrize("file", ["test_staging.py", slow("test_tensor.py")])
def test_where_operations_lag(file):
    """CuPy's operations wait on their streams, as kernels do, so that a missing event shows."""
    run(file, {"DISTOPT_EMULATED_LAG": "1"})


def run(file, more=None):
    build.build()
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "DISTOPT_DEVICE": "cuda", **(more or {})}
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    ended = Program(command, {**environment, "PATH": os.environ["PATH"]}).end()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout
