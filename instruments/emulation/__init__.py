"""The GPU road without a GPU: CUDA, CuPy and NCCL on host memory, and PyTorch's devices; for these, see `torch_gpu`.

A test that uses it builds everything once (`build.build()`), and calls `activate` in a process of its own, for what it
puts in place stays there.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from . import build

__all__ = ["activate"]


def activate() -> None:
    """From now on this process finds the emulated CUDA, and the libraries that stand in."""
    if "_emulation" in sys.modules:
        return
    if "cupy" in sys.modules:
        raise RuntimeError("this process has loaded the real CuPy already; activate in a process of its own")
    ctypes.CDLL(str(build.CUDA), ctypes.RTLD_GLOBAL)  # the fake libraries take their streams from there
    sys.path.insert(0, str(Path(__file__).parent))  # the package cupy, and what it stands on
    importlib.import_module("_emulation")
    os.environ["CUPY_CACHE_DIR"] = str(build.kernels())
    os.environ["DISTOPT_NCCL_LIBRARY"] = str(build.NCCL)
