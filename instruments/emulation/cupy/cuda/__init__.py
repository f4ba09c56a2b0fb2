"""Devices, memory, streams and events of the stand-in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import _emulation as _emulated
import numpy as np

from instruments.emulation import build

from . import runtime

__all__ = [
    "Device",
    "Event",
    "MemoryPool",
    "PythonFunctionAllocator",
    "Stream",
    "alloc",
    "alloc_pinned_memory",
    "get_current_stream",
    "get_elapsed_time",
    "nvrtc",
    "runtime",
    "using_allocator",
]

nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))

_local = threading.local()
_SPOILED = 1 << 20  # bytes of freed memory that become NaN; to fill the workspace of each product would take 5 ms
_pinned: dict[int, int] = {}  # size in bytes, by address
_free_pinned: dict[int, list[int]] = {}  # addresses by size
host_waits: list[str] = []  # what the host waited for: not CuPy's, for tests


class Device:
    """The emulated GPU; there are `runtime.device_count` of them, all the same memory."""

    def __init__(self, device: Any = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        if not 0 <= self.id < runtime.getDeviceCount():
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self._previous = runtime.getDevice()
        return self.use()

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(self._previous)

    def use(self) -> Device:
        runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        host_waits.append("device")
        _emulated.device_synchronize()

    compute_capability = "90"

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 1}  # so that loops over a grid go round

    @property
    def cublas_handle(self) -> int:
        """A handle for each thread and device; loads the library."""
        handles: dict[int, ctypes.c_void_p] = vars(_local).setdefault("cublas_handles", {})
        if self.id not in handles:
            handles[self.id] = ctypes.c_void_p()
            ctypes.CDLL(str(build.CUBLAS)).cublasCreate_v2(ctypes.byref(handles[self.id]))
        return handles[self.id].value or 0

    @property
    def pci_bus_id(self) -> str:
        return str(_emulated.pci_bus_id(self.id))


# -- memory ------------------------------------------------------------------------------------------------------------
class BaseMemory:
    """A run of device memory."""

    ptr: int
    size: int
    device_id: int

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        return self.ptr <= array.ctypes.data < self.ptr + max(self.size, 1)


class Memory(BaseMemory):
    """Memory of its own, which the runtime allocates and frees."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, runtime.getDevice()
        self.ptr: int = _emulated.malloc(max(size, 1))

    def __del__(self, free: Any = _emulated.free) -> None:
        if hasattr(self, "ptr"):
            free(self.ptr)


class MemoryPointer:
    """An address in a run of memory, which it keeps alive."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        _emulated.memset_async(self.ptr, value, size, (stream or get_current_stream()).ptr)


class MemoryPool:
    """Memory that goes back to this pool, by device, stream and size; what it has is from `allocator`."""

    def __init__(self, allocator: Any = None) -> None:
        self.spoils = allocator is None
        self._allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))
        self._all: list[BaseMemory] = []  # else the collector would free what it finds in a cycle with who had it
        self.free: dict[tuple[int, int, int], list[BaseMemory]] = {}

    def malloc(self, size: int) -> MemoryPointer:
        stream, rounded = get_current_stream().ptr, -(-max(size, 1) // 512) * 512
        free = self.free.setdefault((runtime.getDevice(), stream, rounded), [])
        try:
            whole = free.pop()
        except IndexError:
            whole = self._allocator(rounded).mem
            self._all.append(whole)
        return MemoryPointer(_Lent(self, whole, stream, rounded), 0)


class _External(BaseMemory):
    """Memory of an allocator, to which it goes back."""

    def __init__(self, ptr: int, size: int, device_id: int, free: Any) -> None:
        self.ptr, self.size, self.device_id, self._free = ptr, size, device_id, free

    def __del__(self) -> None:
        self._free(self.ptr, self.device_id)


class PythonFunctionAllocator:
    """Takes memory by a function of a size and a device, and gives it back by one of an address and a device."""

    def __init__(self, malloc_func: Any, free_func: Any) -> None:
        self._malloc, self._free = malloc_func, free_func

    def malloc(self, size: int) -> MemoryPointer:
        device = runtime.getDevice()
        return MemoryPointer(_External(self._malloc(size, device), size, device, self._free), 0)


class Foreign(BaseMemory):
    """Memory that `owner`, an array of another library, keeps alive."""

    def __init__(self, ptr: int, size: int, device_id: int, owner: Any) -> None:
        self.ptr, self.size, self.device_id, self.owner = ptr, size, device_id, owner


class _Lent(BaseMemory):
    """Memory of a `MemoryPool`.

    As in CuPy, memory that is let go serves again for the stream that was current when it was allocated, at once. It
    turns into NaN in the order of that stream, as if others had used it, so that another stream which still reads it
    reads something wrong. Memory of a graph does so in the recording alone, since replays need what the last one left.
    """

    def __init__(self, pool: MemoryPool, whole: BaseMemory, stream: int, size: int) -> None:
        self._pool, self._whole, self._stream = pool, whole, stream
        self.ptr, self.size, self.device_id = whole.ptr, size, whole.device_id

    def __del__(self, capturing: Any = _emulated.stream_capturing, memset: Any = _emulated.memset_async) -> None:
        with contextlib.suppress(RuntimeError):  # the stream may be gone; then nothing can be ordered behind it
            if self._pool.spoils or capturing(self._stream):
                memset(self.ptr, 0xFF, min(self.size, _SPOILED), self._stream)
        self._pool.free[self.device_id, self._stream, self.size].append(self._whole)


_default_pool = MemoryPool()


@contextlib.contextmanager
def using_allocator(allocator: Any = None) -> Any:
    """Arrays of this thread take their memory from `allocator`."""
    before = getattr(_local, "allocator", None)
    _local.allocator = allocator
    try:
        yield
    finally:
        _local.allocator = before


def alloc(size: int) -> MemoryPointer:
    """Device memory, uninitialised."""
    allocator = getattr(_local, "allocator", None) or _default_pool.malloc
    pointer: MemoryPointer = allocator(size)
    return pointer


def host_bytes(pointer: MemoryPointer, n_bytes: int) -> Any:
    """The emulated device memory as a buffer for NumPy."""
    return (ctypes.c_char * max(n_bytes, 1)).from_address(pointer.ptr)


def alloc_pinned_memory(size: int) -> Any:
    """Host memory from which the device copies by itself: an object with the buffer protocol, `ptr` and `size()`.

    As in CuPy, memory that is let go serves again at once, even if the device still copies.
    """
    free = _free_pinned.setdefault(size, [])
    address = free.pop() if free else _emulated.malloc_host(max(size, 1))
    _pinned[address] = size
    kind = type("PinnedMemoryPointer", (ctypes.c_char * max(size, 1),), {"ptr": address, "size": lambda _: size})
    memory = kind.from_address(address)  # type: ignore[attr-defined]
    weakref.finalize(memory, free.append, address)
    return memory


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    return any(start <= array.ctypes.data < start + size for start, size in _pinned.items())


def copy_async(to: int, source: int, n_bytes: int, stream: Any = None) -> None:
    """Enqueue a copy between any two places."""
    _emulated.memcpy_async(to, source, n_bytes, 4, (stream or get_current_stream()).ptr)


# -- streams -----------------------------------------------------------------------------------------------------------
class Stream:
    """A queue of work, which runs only when waited for."""

    null: Stream
    _owner: Any = None  # of a stream of another library

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self.ptr: int = 0 if null else _emulated.stream_create(non_blocking)
        self.device_id = -1 if null else runtime.getDevice()

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """A stream of another library, which goes on to own it; on any device, as CuPy 14.2 does not know its own."""
        stream = cls(null=True)
        stream.ptr, stream._owner = obj.__cuda_stream__()[1], obj
        return stream

    def __del__(self, destroy: Any = _emulated.stream_destroy) -> None:
        if getattr(self, "ptr", 0) and self._owner is None:
            destroy(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        self._check_device()
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def use(self) -> Stream:
        self._check_device()
        _stack()[-1] = self
        return self

    def _check_device(self) -> None:
        if self.device_id not in (-1, runtime.getDevice()):
            raise RuntimeError(f"The device that the stream is created on ({self.device_id}) does not match")

    def synchronize(self) -> None:
        host_waits.append("stream")
        _emulated.stream_synchronize(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _emulated.stream_wait_event(self.ptr, event.ptr)


Stream.null = Stream(null=True)


class Event:
    """A point in a stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr: int = _emulated.event_create()

    def __del__(self, destroy: Any = _emulated.event_destroy) -> None:
        if hasattr(self, "ptr"):
            destroy(self.ptr)

    def record(self, stream: Stream | None = None) -> None:
        _emulated.event_record(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        host_waits.append("event")
        _emulated.event_synchronize(self.ptr)

    @property
    def done(self) -> bool:
        return bool(_emulated.event_query(self.ptr))


def _stack() -> list[Any]:
    if not hasattr(_local, "streams"):
        _local.streams = [Stream.null]
    streams: list[Any] = _local.streams
    return streams


def get_current_stream(device_id: int = -1) -> Any:
    """The stream on which arrays are computed by this thread."""
    return _stack()[-1]


def drain(stream: Any = None) -> None:
    """Run what waits on a stream, default the current one: array operations come behind it."""
    _emulated.stream_synchronize((stream or get_current_stream()).ptr)


def capturing() -> bool:
    """Whether the current stream records."""
    return bool(_emulated.stream_capturing(get_current_stream().ptr))


def deferring() -> bool:
    """Whether operations on arrays wait on the current stream, as kernels do; else they run at once.

    With $DISTOPT_EMULATED_LAG, for tests that look for races: each operation is computed twice, which takes longer.
    """
    return capturing() or bool(os.environ.get("DISTOPT_EMULATED_LAG"))


def run(task: Any) -> None:
    """Call `task` behind what waits on the current stream: now, or when its turn comes if operations are deferred."""
    if deferring():
        _emulated.launch(get_current_stream().ptr, task)
    else:
        drain()
        task()


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """As much for all work: benchmarks can run, and mean nothing."""
    return 1.0
