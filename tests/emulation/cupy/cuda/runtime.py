"""The calls of the CUDA runtime that distopt makes through CuPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import _emulation as _emulated


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def getDeviceCount() -> int:  # noqa: N802
    try:
        return int(_emulated.device_count())
    except RuntimeError as error:
        raise CUDARuntimeError(100, str(error)) from None


def getDevice() -> int:  # noqa: N802
    return int(_emulated.get_device())


def setDevice(device: int) -> None:  # noqa: N802
    _emulated.set_device(device)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {"name": b"Emulated GPU", "uuid": bytes([device]) * 16, "multiProcessorCount": 2, "totalGlobalMem": 1 << 30}


def runtimeGetVersion() -> int:  # noqa: N802
    return 13000


def driverGetVersion() -> int:  # noqa: N802
    return 13000


def streamBeginCapture(stream: int, mode: int = 2) -> None:  # noqa: N802
    _emulated.begin_capture(stream, mode)


def streamEndCapture(stream: int) -> int:  # noqa: N802
    return int(_emulated.end_capture(stream))


def graphInstantiate(graph: int) -> int:  # noqa: N802
    return int(_emulated.graph_instantiate(graph))


def graphLaunch(graphExec: int, stream: int) -> None:  # noqa: N802
    _emulated.graph_launch(graphExec, stream)


graphDestroy = graphExecDestroy = _emulated.graph_destroy  # noqa: N816


def pointerGetAttributes(ptr: int) -> Any:  # noqa: N802
    return SimpleNamespace(type=_emulated.memory_type(ptr))
