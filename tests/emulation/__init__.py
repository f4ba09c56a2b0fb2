"""The GPU road without a GPU: CUDA, CuPy and NCCL on host memory.

A test that uses it builds everything once (`build.build()`), and calls `activate` in a process of its own, for what it
puts in place stays there.
"""

from __future__ import annotations

import ctypes
import importlib.util
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
    path = build.cuda_module()
    ctypes.CDLL(str(build.CUDA), ctypes.RTLD_GLOBAL)  # the fake libraries take their streams from there
    sys.path[:0] = [str(Path(__file__).parent), str(build.FOLDER)]  # the packages cupy and cudnn; their native module
    importlib.import_module("_emulation")
    spec = importlib.util.spec_from_file_location("distopt._cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distopt._cuda"] = module
    spec.loader.exec_module(module)
    if "distopt" in sys.modules:
        sys.modules["distopt"]._cuda = module  # type: ignore[attr-defined]
    os.environ["DISTOPT_NCCL_LIBRARY"] = str(build.NCCL)
    os.environ["DISTOPT_CUBLAS_LIBRARY"] = str(build.CUBLAS)
