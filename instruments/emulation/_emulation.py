"""The emulated driver for Python: the functions of build/emulation/libcuda.so.1 that the stand-ins stand on.

Handles and addresses are integers. Calls release Python's lock, as several wait. $DISTOPT_EMULATED_GPUS is the number
of devices (default 8); CUDA_VISIBLE_DEVICES selects among them.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

_library = ctypes.CDLL("libcuda.so.1")  # which `activate` has loaded
_NOT_READY = 600


def _call(name: str, *arguments: Any, library: Any = _library, word: Any = ctypes.c_ssize_t) -> int:
    """The status, which is success or "not ready". The defaults are there when objects go at the end of the process.

    As CUDA's runtime, which CuPy calls, this makes a context where the thread has none.
    """
    library.emulation_make_context()
    code: int = getattr(library, name)(*[word(value) if isinstance(value, int) else value for value in arguments])
    if code not in (0, _NOT_READY):
        raise RuntimeError(f"{name}: CUDA error {code}")
    return code


def _made(name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> Any:
    """The value that a function stores where its first argument points to."""
    value = kind()
    _call(name, ctypes.byref(value), *arguments)
    return value.value or 0


# -- devices and memory ------------------------------------------------------------------------------------------------
get_device = _library.emulation_device
device_synchronize = partial(_call, "cuCtxSynchronize")
malloc = partial(_made, "cuMemAlloc_v2")  # of bytes
free = partial(_call, "cuMemFree_v2")
malloc_host = partial(_made, "cuMemAllocHost_v2")
memory_type = partial(_made, "cuPointerGetAttribute", 2, kind=ctypes.c_int)  # of an address
memset_async = partial(_call, "cuMemsetD8Async")  # to, value, bytes, stream


def visible_devices() -> list[int]:
    """The numbers that the visible devices have in the machine."""
    there, chosen = range(int(os.environ.get("DISTOPT_EMULATED_GPUS", 8))), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [*there]
    return [int(number) for number in chosen.split(",") if number and int(number) in there]


def pci_bus_id(device: int) -> str:
    return f"0000:{visible_devices()[device] + 1:02X}:00.0"


def set_device(device: int) -> None:
    _call("cuCtxSetCurrent", device + 1)


def memcpy_async(to: int, source: int, n_bytes: int, _kind: int, stream: int) -> None:
    _call("cuMemcpyAsync", to, source, n_bytes, stream)


# -- streams and events ------------------------------------------------------------------------------------------------
stream_destroy = partial(_call, "cuStreamDestroy_v2")
stream_synchronize = partial(_call, "cuStreamSynchronize")  # runs what is in it; the way to look at arrays, too
event_create = partial(_made, "cuEventCreate", 0)
event_destroy = partial(_call, "cuEventDestroy_v2")
event_record = partial(_call, "cuEventRecord")  # event, stream
event_synchronize = partial(_call, "cuEventSynchronize")


def stream_create(non_blocking: bool) -> int:
    return int(_made("cuStreamCreateWithPriority", int(non_blocking), 0))


def stream_wait_event(stream: int, event: int) -> None:
    _call("cuStreamWaitEvent", stream, event, 0)


def event_query(event: int) -> bool:
    return _call("cuEventQuery", event) == 0


# -- graphs, and work of Python ----------------------------------------------------------------------------------------
begin_capture = partial(_call, "cuStreamBeginCapture_v2")  # stream, mode
graph_instantiate = partial(_made, "cuGraphInstantiate")
graph_launch = partial(_call, "cuGraphLaunch")  # executable, stream
graph_destroy = partial(_call, "cuGraphDestroy")

_tasks: dict[int, Callable[[], None]] = {}  # a graph may run one at any time
_numbers = count()


def stream_capturing(stream: int, call: Any = _call, kind: Any = ctypes.c_int, byref: Any = ctypes.byref) -> bool:
    status = kind()
    call("cuStreamIsCapturing", stream, byref(status))
    return bool(status.value)


def end_capture(stream: int) -> int:
    graph = ctypes.c_void_p()
    _call("cuStreamEndCapture", stream, ctypes.byref(graph))
    return graph.value or 0


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    _tasks[ctypes.c_size_t.from_address(number).value]()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _is_over(number: int) -> int:
    return int(time.monotonic() > _lags[number])


_lags: dict[int, float] = {}


def lag(stream: int, seconds: float) -> None:
    """Keep the stream busy for some seconds, as a long kernel does; queries return meanwhile."""
    number = next(_numbers) + 1  # 0 would be None
    _lags[number] = time.monotonic() + seconds
    _call("emulation_enqueue", stream, _is_over, number)


def launch(stream: int, task: Callable[[], None]) -> None:
    """Put a Python function on the stream, as a kernel is."""
    number = ctypes.c_size_t(next(_numbers))
    if stream_capturing(stream):
        _tasks[number.value] = task
    else:
        _tasks[number.value] = lambda: (_tasks.pop(number.value), task())[1]
    _call("emulation_launch", stream, _run, ctypes.byref(number), ctypes.sizeof(number))
