"""The calls of the CUDA runtime that distopt makes through CuPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import _emulation as _emulated

getDevice, setDevice = _emulated.get_device, _emulated.set_device  # noqa: N816
streamBeginCapture, streamEndCapture = _emulated.begin_capture, _emulated.end_capture  # noqa: N816
graphInstantiate, graphLaunch = _emulated.graph_instantiate, _emulated.graph_launch  # noqa: N816
graphDestroy = graphExecDestroy = _emulated.graph_destroy  # noqa: N816


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def getDeviceCount() -> int:  # noqa: N802
    if count := len(_emulated.visible_devices()):
        return count
    raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    return {"name": b"Emulated GPU"}


def runtimeGetVersion() -> int:  # noqa: N802
    return 13000


driverGetVersion = runtimeGetVersion  # noqa: N816


def pointerGetAttributes(ptr: int) -> Any:  # noqa: N802
    return SimpleNamespace(type=_emulated.memory_type(ptr))
