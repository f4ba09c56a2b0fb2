"""Memory, streams and events of the emulated GPU.

They are those of the emulated `distopt._cuda`, where that is what was built: its streams run their work late, so that a
missing event shows. Without it memory is plain and streams have nothing to do, since all work runs at once.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any


class PlainRuntime:
    """Host memory, and streams and events that are numbers."""

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def malloc(self, n_bytes: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * n_bytes, n_bytes + 256)
        address = ctypes.addressof(block)
        pointer = address + -address % 256
        self._blocks[pointer] = block
        return pointer

    def free(self, pointer: int) -> None:
        del self._blocks[pointer]

    def stream_create(self) -> int:
        return next(self._handles)

    event_create = stream_create

    def nothing(self, *_: int) -> None:
        """Work is over when it is handed over."""

    stream_destroy = stream_synchronize = stream_wait_event = drain = nothing
    event_destroy = event_record = event_synchronize = nothing

    def event_query(self, event: int) -> bool:
        return True

    def memset_async(self, pointer: int, value: int, n_bytes: int, stream: int) -> None:
        ctypes.memset(pointer, value, n_bytes)

    def copy_async(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        ctypes.memmove(to, source, n_bytes)

    def device_synchronize(self) -> None:
        """Nothing is under way."""


def _find() -> Any:
    try:
        from distopt import _cuda
    except ImportError:
        return PlainRuntime()
    return _cuda.emulation if hasattr(_cuda, "emulation") else PlainRuntime()


runtime: Any = _find()
