"""Capturing work of this thread in CUDA graphs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..core.array import Array
from ..devices.device import Device


class Capture:
    """Captures pieces of work on a stream of its own, in memory of its own, to be launched on CuPy's current stream.

    Attributes:
        memory: all memory allocated for the pieces; it lives as long as this object.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cuda = cuda = device.xp.cuda
        self.memory: list[Any] = []
        self._pool = cuda.MemoryPool(_allocator(cuda, self.memory))
        # Non-blocking: other threads may use the default stream meanwhile.
        self._stream = cuda.Stream(non_blocking=True)
        self._launched_on = cuda.get_current_stream().ptr
        self._inside: contextlib.ExitStack | None = None

    def own_memory(self) -> Any:
        """A context in which new arrays lie in the graph's memory."""
        return self._cuda.using_allocator(self._pool.malloc)

    def holds(self, array: Array) -> bool:
        """Whether `array` lies in the graph's memory."""
        address = array.data.ptr
        return any(run.ptr <= address < run.ptr + run.size for run in self.memory)

    def begin(self, what: str) -> None:
        """Capture the work of this thread, the pass `what`, until `end`. Meanwhile CuPy works on another stream."""
        with contextlib.ExitStack() as inside:
            inside.enter_context(_no_collection())
            inside.enter_context(self._stream)
            inside.enter_context(self.own_memory())
            self._device.capturing = what
            inside.callback(setattr, self._device, "capturing", "")
            self._cuda.runtime.streamBeginCapture(self._stream.ptr, _THREAD_LOCAL)
            self._inside = inside.pop_all()

    def end(self) -> Graph:
        """The captured piece.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        assert self._inside is not None
        inside, self._inside = self._inside, None
        with inside:
            return Graph(self._cuda.runtime, self._cuda.runtime.streamEndCapture(self._stream.ptr))

    def abort(self) -> None:
        """Leave no capture under way. None of its work was run."""
        if self._inside is not None:
            with contextlib.suppress(RuntimeError):  # what made it fail is known
                self.end()

    def launch(self, piece: Graph) -> None:
        """Enqueue the work of a piece."""
        self._cuda.runtime.graphLaunch(piece.executable, self._launched_on)


class Graph:
    """Captured work, ready to be launched any number of times, with the addresses that it was captured with.

    Attributes:
        executable: cudaGraphExec_t.
        nodes: number of launches, copies and so on.
    """

    def __init__(self, runtime: Any, graph: int) -> None:
        """Takes a cudaGraph_t, which is freed; raises a RuntimeError if its replay would use old values of the host."""
        self._destroy = runtime.graphExecDestroy
        try:
            self.nodes = _refuse_host(runtime, graph)
            self.executable = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        if hasattr(self, "executable"):
            with suppress(RuntimeError):  # the driver may have ended
                self._destroy(self.executable)


# The mode of a capture: calls of its thread that might wait for the device fail. Other threads, such as the one that
# polls NCCL, may make them.
_THREAD_LOCAL = 1
# Values of cuda.h, the same from CUDA 12.0 to 13.5. First, kinds of nodes. Then the size of CUDA_MEMCPY3D, in words of
# 8 bytes, and the words with the types of memory of source and target. An address in "unified" memory stands two words
# after its type.
_MEMCPY, _HOST_CALL = 1, 3
_COPY_WORDS, _SOURCE, _TARGET = 25, 4, 15
_HOST, _UNIFIED = 1, 4
_DEVICE, _MANAGED = 2, 3  # types as the runtime tells them


def _refuse_host(runtime: Any, graph: int) -> int:
    """Raise an error if `graph` copies from or to host memory, or calls the host; else the number of its nodes."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")

    handle, count, kind = ctypes.c_void_p(graph), ctypes.c_size_t(), ctypes.c_int()
    call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    for node in map(ctypes.c_void_p, nodes):
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _HOST_CALL:
            raise RuntimeError("the step calls a function of the host")
        if kind.value == _MEMCPY:
            copy = (ctypes.c_size_t * _COPY_WORDS)()
            call("cuGraphMemcpyNodeGetParams", node, copy)
            if _on_host(runtime, copy[_SOURCE], copy[_SOURCE + 2]):
                raise RuntimeError("the step copies from the host, where values may change")
            if _on_host(runtime, copy[_TARGET], copy[_TARGET + 2]):
                raise RuntimeError("the step copies to the host")
    return count.value


def _on_host(runtime: Any, memory: int, address: int) -> bool:
    kind = memory & 0xFFFFFFFF  # an int; four bytes of padding follow
    if kind == _UNIFIED:
        return runtime.pointerGetAttributes(address).type not in (_DEVICE, _MANAGED)
    return kind == _HOST


def _allocator(cuda: Any, memory: list[Any]) -> Callable[[int], Any]:
    """The allocator of a pool; all its memory stays in `memory`, even if the pool frees it."""

    def allocate(size: int) -> Any:
        device = cuda.Device()

        def made() -> Any:
            with device:
                return cuda.Memory(size)

        # cudaMalloc enqueues nothing, but CUDA refuses it to a thread that captures, since it may wait.
        with ThreadPoolExecutor(1) as thread:
            memory.append(thread.submit(made).result())
        return cuda.MemoryPointer(memory[-1], 0)

    return allocate


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: it could free CUDA memory, which fails during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
