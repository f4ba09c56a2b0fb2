"""The emulator of the CUDA runtime: right programs give right results, and faults of the usual kinds show."""

import os
import signal
import subprocess
import sys

import pytest

from tests.emulation import build

PROLOGUE = """
import ctypes, os, threading
from tests.emulation import activate
activate()
import _emulation as cuda
import cupy

H2D, D2H = 1, 2
size = 64
device, other = cuda.malloc(size), cuda.malloc(size)
pinned = cuda.malloc_host(size)
first, second = cuda.stream_create(True), cuda.stream_create(True)

LOCAL, RELAXED = 1, 2  # modes of capture

def graph(stream):
    from cupy.cuda import runtime
    from distopt.nn.replay.capture import Graph
    return Graph(runtime, cuda.end_capture(stream))

def byte(address):
    return ctypes.string_at(address, 1)[0]

def fails(number, function, *args):
    try:
        function(*args)
    except RuntimeError as error:
        assert f"(CUDA error {number})" in str(error), error
    else:
        raise AssertionError("no error")

def kernel(text, expression="kernel"):
    from cupy.cuda import Module, nvrtc
    program, module = nvrtc.createProgram(text, "", (), ()), Module()
    nvrtc.addNameExpression(program, expression)
    nvrtc.compileProgram(program, ())
    module.load(nvrtc.getCUBIN(program))
    return module.get_function(nvrtc.getLoweredName(program, expression))
"""

# Without its barriers, a thread of the first meets sums that are not complete yet; in the second, a write overtakes the
# read of the same number by another thread.
KERNELS = {
    "a missing barrier in a sum gives a wrong one": """
        tree = '''
        template <bool barriers> __global__ void kernel(const int* in, int* out) {
          __shared__ int sums[256];
          sums[threadIdx.x] = in[blockIdx.x * 256 + threadIdx.x];
          for (unsigned step = 128; step; step /= 2) {
            if (barriers) __syncthreads();
            if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
          }
          if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
        }
        '''
        numbers = cupy.arange(1024, dtype="int32")
        expected = numbers.get().reshape(4, 256).sum(axis=1)
        for barriers in ("true", "false"):
            for _ in range(2):  # blocks go up in one launch and down in the next
                sums = cupy.zeros(4, "int32")
                kernel(tree, f"kernel<{barriers}>")((4,), (256,), (numbers, sums))
                right = sums.get() == expected
                assert right.all() if barriers == "true" else not right.any()
    """,
    "a write that overtakes a read gives a wrong result": """
        rotate = '''
        template <bool barrier> __global__ void kernel(int* numbers) {
          const int left = numbers[(threadIdx.x + 255) % 256];
          if (barrier) __syncthreads();
          numbers[threadIdx.x] = left;
        }
        '''
        for barrier in ("true", "false"):
            numbers = cupy.arange(256, dtype="int32")
            kernel(rotate, f"kernel<{barrier}>")((1,), (256,), (numbers,))
            assert (numbers.get() == [255, *range(255)]).all() == (barrier == "true")
    """,
}
NEVER_MEET = {
    "if (threadIdx.x < 16) __ballot_sync(0xffffffff, 1); else __shfl_sync(0xffffffff, 1, 0);": "different operations",
    "if (threadIdx.x == 0) __syncwarp(0x3);": "wait for each other",
}

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
    "the legacy stream waits for blocking streams, and they for it": """
        blocking = cuda.stream_create(False)
        cuda.memset_async(device, 1, size, blocking)
        cuda.memset_async(other, 1, size, first)
        cuda.memset_async(device, 2, size, 0)
        cuda.memset_async(device, 3, size, blocking)
        cuda.stream_synchronize(blocking)
        assert (byte(device), byte(other)) == (3, 0xFF)
        cuda.stream_synchronize(0)
        assert (byte(device), byte(other)) == (3, 0xFF)
        cuda.device_synchronize()
        assert byte(other) == 1
    """,
    "pinned memory is read when its turn comes, pageable memory at once": """
        ctypes.memset(pinned, 1, size)
        cuda.memcpy_async(device, pinned, size, H2D, first)
        ctypes.memset(pinned, 2, size)
        cuda.stream_synchronize(first)
        assert byte(device) == 2
        page = ctypes.create_string_buffer(size)
        cuda.memcpy_async(ctypes.addressof(page), device, size, D2H, first)
        assert page[0] == b"\\x02"
    """,
    "memory that is given back too early is spoilt": """
        memory = cuda.pool_malloc(size, first)
        cuda.memset_async(memory, 7, size, first)
        event = cuda.event_create()
        cuda.event_record(event, first)
        cuda.stream_wait_event(second, event)
        cuda.memcpy_async(other, memory, size, 3, second)
        cuda.pool_free(memory, size, first)
        assert cuda.pool_malloc(size, second) != memory
        assert cuda.pool_malloc(size, first) == memory
        cuda.stream_synchronize(first)
        cuda.stream_synchronize(second)
        assert byte(other) == 0xFF
    """,
    "a recording runs nothing, and its graph as often as it is launched": """
        cuda.begin_capture(first, LOCAL)
        cuda.memset_async(device, 3, size, first)
        cuda.memcpy_async(other, device, size, 3, first)
        piece = graph(first)
        assert piece.nodes == 2
        cuda.device_synchronize()
        assert byte(device) == byte(other) == 0xFF
        for _ in range(2):
            cuda.memset_async(other, 4, size, second), cuda.stream_synchronize(second)
            cuda.graph_launch(piece.executable, second)
            assert byte(other) == 4, "a launch is work of a stream like any other"
            cuda.stream_synchronize(second)
            assert byte(device) == byte(other) == 3
        cuda.begin_capture(first, LOCAL)
        nothing = graph(first)
        cuda.graph_launch(nothing.executable, first)
    """,
    "what a recording forbids makes it useless": """
        event = cuda.event_create()
        cuda.event_record(event, second)
        for number, function, *args in (
            (900, cuda.stream_synchronize, first),
            (900, cuda.stream_query, first),
            (900, cuda.device_synchronize),
            (900, cuda.malloc, 8),
            (900, cuda.malloc_host, 8),
            (900, cuda.free, other),
            (900, cuda.event_query, event),
            (905, cuda.stream_wait_event, first, event),
        ):
            cuda.begin_capture(first, LOCAL)
            fails(number, function, *args)
            fails(901, cuda.memset_async, device, 1, size, first)
            fails(901, cuda.end_capture, first)
        cuda.begin_capture(first, LOCAL)
        cuda.event_record(event, first)
        fails(905, cuda.stream_wait_event, second, event)  # here a recording is of one stream
        fails(901, cuda.end_capture, first)
        fails(907, cuda.event_query, event)
        cuda.begin_capture(first, RELAXED)
        assert cuda.malloc(8)
        cuda.graph_destroy(cuda.end_capture(first))
        cuda.begin_capture(first, LOCAL)
        others = []
        thread = threading.Thread(target=lambda: others.append(cuda.malloc(8)))  # another thread may
        thread.start(), thread.join()
        assert others
        cuda.graph_destroy(cuda.end_capture(first))
        fails(903, cuda.end_capture, first)
        fails(900, cuda.begin_capture, 0, RELAXED)
        cuda.memset_async(device, 6, size, first)
        cuda.stream_synchronize(first)
        assert byte(device) == 6
    """,
    "a graph holds no copy from or to the host": """
        for to, source in ((device, pinned), (pinned, device)):
            cuda.begin_capture(first, RELAXED)
            cuda.memcpy_async(to, source, size, 4, first)
            try:
                graph(first)
            except RuntimeError as error:
                assert "copies " + ("from" if to == device else "to") + " the host" in str(error)
            else:
                raise AssertionError("no error")
        cuda.memset_async(device, 1, size, first)
        cuda.stream_synchronize(first)
    """,
}


def ended(code: str) -> subprocess.CompletedProcess[str]:
    build.build()
    code = PROLOGUE + "\n".join(line[8:] for line in code.splitlines())
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run([sys.executable, "-c", code], cwd=build.ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow(kept=4)
@pytest.mark.timeout(600)  # the first test of a session compiles the emulator
@pytest.mark.parametrize("name", SCRIPTS)
def test_streams(name):
    done = ended(SCRIPTS[name])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    done = ended(KERNELS[name])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("body", NEVER_MEET, ids=NEVER_MEET.get)
def test_threads_that_cannot_meet_end_the_process_and_are_named(body):
    code = f"""
        kernel("__global__ void kernel() {{ {body} }}")((1,), (32,), ())
        cuda.device_synchronize()
    """
    done = ended(code)
    assert done.returncode == -signal.SIGABRT
    assert NEVER_MEET[body] in done.stderr
    assert "block (0, 0, 0)" in done.stderr
