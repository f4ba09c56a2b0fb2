"""The emulated CUDA runtime for Python: the functions of build/emulation/libcuda.so.1 that the stand-ins stand on.

Handles and addresses are integers. Calls release Python's lock, as several wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

_library = ctypes.CDLL("libcuda.so.1")  # which `activate` has loaded
_library.cudaGetErrorString.restype = ctypes.c_char_p
_NOT_READY = 600


def _call(name: str, *arguments: Any, library: Any = _library, word: Any = ctypes.c_ssize_t) -> int:
    """The status, which is success or "not ready". The defaults are there when objects go at the end of the process."""
    code: int = getattr(library, name)(*[word(value) if isinstance(value, int) else value for value in arguments])
    if code not in (0, _NOT_READY):
        raise RuntimeError(f"{name}: {library.cudaGetErrorString(code).decode()} (CUDA error {code})")
    return code


def _made(name: str, *arguments: Any, kind: Any = ctypes.c_void_p) -> Any:
    """The value that a function stores where its first argument points to."""
    value = kind()
    _call(name, ctypes.byref(value), *arguments)
    return value.value or 0


# -- devices and memory ------------------------------------------------------------------------------------------------
device_count = partial(_made, "cudaGetDeviceCount", kind=ctypes.c_int)
get_device = partial(_made, "cudaGetDevice", kind=ctypes.c_int)
set_device = partial(_call, "cudaSetDevice")
device_synchronize = partial(_call, "cudaDeviceSynchronize")
malloc = partial(_made, "cudaMalloc")  # of bytes
free = partial(_call, "cudaFree")
malloc_host = partial(_made, "cudaMallocHost")
memcpy_async = partial(_call, "cudaMemcpyAsync")  # to, from, bytes, kind, stream
memset_async = partial(_call, "cudaMemsetAsync")  # to, value, bytes, stream


def pci_bus_id(device: int) -> str:
    text = ctypes.create_string_buffer(16)
    _call("cudaDeviceGetPCIBusId", text, len(text), device)
    return text.value.decode()


def memory_type(address: int) -> int:
    return int(_made("cudaPointerGetAttributes", address, kind=ctypes.c_int))


# -- streams and events ------------------------------------------------------------------------------------------------
stream_destroy = partial(_call, "cudaStreamDestroy")
stream_synchronize = partial(_call, "cudaStreamSynchronize")  # runs what is in it; the way to look at arrays, too
event_create = partial(_made, "cudaEventCreateWithFlags", 0)
event_destroy = partial(_call, "cudaEventDestroy")
event_record = partial(_call, "cudaEventRecord")  # event, stream
event_synchronize = partial(_call, "cudaEventSynchronize")


def stream_create(non_blocking: bool = False) -> int:
    return int(_made("cudaStreamCreateWithPriority", int(non_blocking), 0))


def stream_wait_event(stream: int, event: int) -> None:
    _call("cudaStreamWaitEvent", stream, event, 0)


def event_query(event: int) -> bool:
    return _call("cudaEventQuery", event) == 0


# -- graphs, and work of Python ----------------------------------------------------------------------------------------
begin_capture = partial(_call, "cudaStreamBeginCapture")  # stream, mode
graph_launch = partial(_call, "cudaGraphLaunch")  # executable, stream
graph_destroy = partial(_call, "cudaGraphDestroy")

_tasks: dict[int, Callable[[], None]] = {}  # a graph may run one at any time
_numbers = count()


def stream_capturing(stream: int, call: Any = _call, kind: Any = ctypes.c_int, byref: Any = ctypes.byref) -> bool:
    status = kind()
    call("cudaStreamIsCapturing", stream, byref(status))
    return bool(status.value)


def end_capture(stream: int) -> int:
    graph = ctypes.c_void_p()
    _call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    return graph.value or 0


def graph_instantiate(graph: int) -> int:
    return int(_made("cudaGraphInstantiate", graph, 0))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    _tasks[ctypes.c_size_t.from_address(number).value]()


def launch(stream: int, task: Callable[[], None]) -> None:
    """Put a Python function on the stream, as a kernel is."""
    number = ctypes.c_size_t(next(_numbers))
    _tasks[number.value] = task
    _call("emulation_launch", stream, _run, ctypes.byref(number), ctypes.sizeof(number))
