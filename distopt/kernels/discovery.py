"""Whether CuPy can compute on a GPU of this machine, and what is missing where it cannot."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .. import _core
from ..errors import pip_install


def find_cupy() -> tuple[Any, str]:
    """CuPy if it sees a GPU and can compile for it; otherwise None, and what is missing and how to fix it.

    This loads CUDA's driver, but creates no context. Processes that are forked afterwards cannot use CUDA.
    """
    try:
        driver = _core.cuda_driver_version()
    except RuntimeError as error:
        return None, f"no driver of NVIDIA ({error}); install one for CUDA 12 or later"
    install = pip_install(f"cuda{12 if driver < 13000 else 13}")
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        return None, f"CuPy cannot be used ({error}); {install}"
    runtime = cupy.cuda.runtime
    try:
        runtime.getDeviceCount()
    except RuntimeError as error:
        newer = runtime.runtimeGetVersion() // 1000 > driver // 1000
        cure = install if newer else "see what nvidia-smi says, and check CUDA_VISIBLE_DEVICES"
        return None, f"no GPU answers ({error}); {cure}"
    try:
        cupy.cuda.nvrtc.getVersion()
    except RuntimeError as error:
        return None, f"CuPy finds no NVRTC to compile kernels ({error}); {install}"
    return cupy, ""
