"""Capturing work of this thread in CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from ..core.array import Array
from ..devices.device import Device


class Capture:
    """Captures pieces of work on a stream of its own, in memory of its own, to be launched on CuPy's current stream.

    Attributes:
        memory: all memory allocated for the pieces; it lives as long as this object.
    """

    def __init__(self, device: Device) -> None:
        from ..kernels import gpu_base

        self._base, self._device = gpu_base, device
        self._cuda = cuda = device.xp.cuda
        self.memory: list[Any] = []
        self._pool = cuda.MemoryPool(_allocator(cuda, gpu_base.native, self.memory))
        # Non-blocking: other threads may use the default stream meanwhile.
        self._stream = cuda.Stream(non_blocking=True)
        self._launched_on = gpu_base.current_stream()
        self._inside: contextlib.ExitStack | None = None

    def own_memory(self) -> Any:
        """A context in which new arrays lie in the graph's memory."""
        return self._cuda.using_allocator(self._pool.malloc)

    def holds(self, array: Array) -> bool:
        """Whether `array` lies in the graph's memory."""
        address = array.data.ptr
        return any(run.ptr <= address < run.ptr + run.size for run in self.memory)

    def begin(self, what: str) -> None:
        """Capture the work of this thread until `end`; until then, another stream is CuPy's current one."""
        with contextlib.ExitStack() as inside:
            inside.enter_context(_no_collection())
            inside.enter_context(self._stream)
            inside.enter_context(self.own_memory())
            self._base.share_workspace(self._device.id(), self._stream.ptr, self._launched_on)
            inside.callback(self._base.share_workspace, self._device.id(), self._stream.ptr, None)
            self._device.recording = what
            inside.callback(setattr, self._device, "recording", "")
            self._base.native.begin_capture(self._stream.ptr)
            self._inside = inside.pop_all()

    def end(self) -> Any:
        """The captured piece."""
        try:
            piece = self._base.native.end_capture(self._stream.ptr)
        except Exception:
            self.abort()
            raise
        self._leave()
        return piece

    def abort(self) -> None:
        """Leave no capture under way."""
        if self._inside is not None:
            self._base.native.abort_capture(self._stream.ptr)
            self._leave()

    def launch(self, piece: Any) -> None:
        """Enqueue the work of a piece."""
        piece.launch(self._launched_on)

    def _leave(self) -> None:
        assert self._inside is not None
        inside, self._inside = self._inside, None
        inside.close()


def _allocator(cuda: Any, native: Any, memory: list[Any]) -> Callable[[int], Any]:
    """The allocator of a pool; all its memory stays in `memory`, even if the pool frees it."""

    def allocate(size: int) -> Any:
        # cudaMalloc does not enqueue work on a stream; but a capture forbids it, as it may wait for the device.
        memory.append(native.allow_in_capture(lambda: cuda.Memory(size)))
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
