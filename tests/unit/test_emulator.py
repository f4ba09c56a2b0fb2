"""The emulator of the CUDA runtime: right programs give right results, and faults of the usual kinds show."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.emulation import build

SOURCES = [f"{name}.cpp" for name in ("runtime", "devices", "memory", "graphs", "blocks", "kernels_for_tests")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulator")
    here = build.ROOT / "tests" / "emulation"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    include = [f"-I{here}", f"-I{build.ROOT / 'csrc'}"]
    target = folder / "kernels.so"
    sources = [str(here / "emulation" / name) for name in SOURCES]
    subprocess.run(["c++", *flags, *include, *sources, "-o", str(target)], check=True, timeout=200)
    return target


@pytest.fixture(scope="module")
def library(path):
    return ctypes.CDLL(str(path))


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.slow  # as all that compile the kernels for tests
@pytest.mark.sweep
@pytest.mark.parametrize("launches", [1, 2])  # blocks go up in one launch and down in the next
@pytest.mark.parametrize("barriers", [True, False])
def test_a_missing_barrier_in_a_sum_gives_a_wrong_one(library, barriers, launches):
    numbers, sums = np.arange(1024, dtype=np.int32), np.zeros(4, np.int32)
    for _ in range(launches):
        library.run_tree(barriers, pointer(numbers), pointer(sums), 4, 0)
    assert not sums.any()  # nothing runs before a wait
    library.synchronize(0)
    right = sums == numbers.reshape(4, 256).sum(axis=1)
    assert right.all() if barriers else not right.any()


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("barrier", [True, False])
def test_a_write_that_overtakes_a_read_gives_a_wrong_result(library, barrier):
    numbers = np.arange(256, dtype=np.int32)
    library.run_rotate(barrier, pointer(numbers), 0)
    library.synchronize(0)
    assert (numbers == np.roll(np.arange(256), 1)).all() == barrier


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "fact"), [("diverged", "different operations"), ("waiting", "wait for each other")])
def test_threads_that_cannot_meet_end_the_process_and_are_named(path, name, fact):
    code = f"import ctypes\nlib = ctypes.CDLL({str(path)!r})\nlib.run_{name}(None, 0)\nlib.synchronize(0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode != 0
    assert fact in ended.stderr
    assert "block (0, 0, 0)" in ended.stderr


# -- streams, from Python ----------------------------------------------------------------------------------------------
PROLOGUE = """
import ctypes, os, threading
from tests.emulation import activate
activate()
import _emulation as cuda

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
"""

SCRIPTS = {
    "work waits for a synchronisation": """
        assert byte(device) == 0xFF  # new memory is NaN
        cuda.memset_async(device, 1, size, first)
        cuda.memset_async(device, 2, size, second)
        assert byte(device) == 0xFF
        cuda.stream_synchronize(second)
        assert byte(device) == 2
        cuda.stream_synchronize(first)
        assert byte(device) == 1
    """,
    "an event orders two streams, up to where it was recorded": """
        for ordered in (True, False):
            event = cuda.event_create()
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
    "a wait is for the record before it": """
        event = cuda.event_create()
        cuda.stream_wait_event(second, event)  # never recorded: no wait
        cuda.event_record(event, first)
        cuda.stream_wait_event(second, event)
        cuda.memset_async(device, 5, size, first)
        cuda.event_record(event, first)
        cuda.memcpy_async(other, device, size, 3, second)
        cuda.stream_synchronize(second)
        assert byte(other) == 0xFF
        cuda.event_synchronize(event)
        assert byte(device) == 5
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
    "other streams become part of a recording, and have to be waited for": """
        forked, joined = cuda.event_create(), cuda.event_create()
        for join in (True, False):
            cuda.begin_capture(first, LOCAL)
            cuda.memset_async(device, 3, size, first)
            cuda.event_record(forked, first)
            cuda.stream_wait_event(second, forked)
            cuda.memcpy_async(other, device, size, 3, second)
            cuda.event_record(joined, second)
            if join:
                cuda.stream_wait_event(first, joined)
                piece = graph(first)
            else:
                fails(904, cuda.end_capture, first)
        assert byte(other) == 0xFF
        cuda.graph_launch(piece.executable, first)
        cuda.stream_synchronize(first)
        assert byte(other) == 3
        fails(907, cuda.event_query, joined)
        cuda.event_record(joined, second)
        assert cuda.event_query(joined)
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


@pytest.mark.slow(kept=4)
@pytest.mark.timeout(600)  # the first test of a session compiles the emulator
@pytest.mark.parametrize("name", SCRIPTS)
def test_streams(name):
    build.build()
    code = PROLOGUE + "\n".join(line[8:] for line in SCRIPTS[name].splitlines())
    hidden = ("CUDA_VISIBLE_DEVICES", "DISTOPT_EMULATED_GPUS")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    ended = subprocess.run([sys.executable, "-c", code], cwd=build.ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
