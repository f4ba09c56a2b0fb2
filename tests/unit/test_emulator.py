"""The emulator of CUDA's driver: right programs give right results, and faults of the usual kinds show."""

import os
import subprocess
import sys

import pytest

from tests.emulation import build

PROLOGUE = """
import ctypes
from tests.emulation import activate
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name):
    build.build()
    code = PROLOGUE + "\n".join(line[8:] for line in SCRIPTS[name].splitlines())
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run([sys.executable, "-c", code], cwd=build.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
