"""The emulator of CUDA: right programs give right results, and faults of the usual kinds, and of cuBLAS, show."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from instruments.emulation import build
from tests.processes import ROOT, Program

PROLOGUE = """
import ctypes
from instruments.emulation import activate
activate()
import _emulation as cuda
import cupy

size = 64
device, other = cuda.malloc(size), cuda.malloc(size)
first, second = cuda.stream_create(True), cuda.stream_create(True)

def byte(address):
    return ctypes.string_at(address, 1)[0]
"""

SCRIPTS = {
    "an event orders two streams, up to where it was recorded": """
        assert byte(device) == 0xFF  # new memory is NaN
        for ordered in (True, False):
            event = cuda.event_create()
            cuda.stream_wait_event(second, event)  # never recorded: no wait
            cuda.memset_async(device, 0, size, 0), cuda.stream_synchronize(0)
            cuda.memset_async(device, 5, size, first)
            cuda.event_record(event, first)
            cuda.memset_async(device, 6, size, first)
            if ordered:
                cuda.stream_wait_event(second, event)
            cuda.memcpy_async(other, device, size, 3, second)
            cuda.event_destroy(event)
            cuda.stream_synchronize(second)
            assert byte(other) == (5 if ordered else 0)
            cuda.stream_synchronize(first)
            assert byte(device) == 6
    """,
    "memory that is given back too early is spoilt": """
        one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with one:
            array = cupy.empty(size, "uint8")
            array.data.memset_async(7, size)
            two.wait_event(one.record())
        address = array.data.ptr
        cuda.memcpy_async(other, address, size, 3, two.ptr)
        del array
        with two:
            assert cupy.empty(size, "uint8").data.ptr != address
        with one:
            assert cupy.empty(size, "uint8").data.ptr == address
        one.synchronize()
        two.synchronize()
        assert byte(other) == 0xFF
    """,
}


def run(prologue: str, code: str) -> subprocess.CompletedProcess[str]:
    build.build()
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    command = [sys.executable, "-c", prologue + textwrap.dedent(code)]
    return subprocess.run(command, cwd=build.ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name):
    done = run(PROLOGUE, SCRIPTS[name])
    assert done.returncode == 0, done.stderr


PRODUCT = """
from instruments.emulation import activate
activate()
import cupy
from distopt.nn.numerics import gpu_base
{}
gpu_base.product(cupy.ones((2, 3), "float32"), cupy.ones((3, 4), "float32"))
"""


MISSING = "MissingDependencyError: products need the cuBLAS of CuPy's CUDA ("
HANDLE = "cupy.cuda.Device.cublas_handle ="


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"{HANDLE} 0", f"{MISSING}libcublas.so.13: cannot open"),
        (f"{HANDLE} property(lambda _: __import__('libcublas'))", f"{MISSING}No module"),
        ("gpu_base._WORKSPACE_BYTES = 0", "cublasSgemm_v2: CUBLAS_STATUS_EXECUTION_FAILED (cuBLAS status 13)"),
    ],
)
def test_errors_of_cublas_are_named_and_its_absence_has_a_cure(line, told):
    error = run("", PRODUCT.format(line)).stderr.splitlines()[-1]
    assert told in error
    assert "cuda13" in error or not told.startswith(MISSING)


@pytest.mark.parametrize(("network", "label"), [("cnn", "CNN of MNIST"), ("resnet50", "ResNet-50, 224 x 224")])
def test_launches_of_a_step_are_those_of_the_docs(network, label):
    build.build()
    ended = Program([sys.executable, "-m", "instruments.gpu.launches", network]).end()
    (count,) = re.findall(r"^ *(\d+) .* in all$", ended.stdout, re.MULTILINE)
    assert f"\n| {label} | {count} |" in (ROOT / "docs" / "results" / "gpu.md").read_text(), ended.stdout
