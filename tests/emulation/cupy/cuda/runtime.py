"""The calls of the CUDA runtime that distopt makes through CuPy."""

from __future__ import annotations

import os
from typing import Any


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_current = 0


def getDeviceCount() -> int:  # noqa: N802
    """`CUDA_VISIBLE_DEVICES` counts, default one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = 1 if visible is None else len([name for name in visible.split(",") if name])
    if not count:
        raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
    return count


def getDevice() -> int:  # noqa: N802
    return _current


def setDevice(device: int) -> None:  # noqa: N802
    global _current
    _current = device


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {"name": b"Emulated GPU", "uuid": bytes([device]) * 16, "multiProcessorCount": 2, "totalGlobalMem": 1 << 30}


def runtimeGetVersion() -> int:  # noqa: N802
    return 13000


def driverGetVersion() -> int:  # noqa: N802
    return 13000
