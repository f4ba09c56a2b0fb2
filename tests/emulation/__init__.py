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
    """From now on this process takes the emulated `_cuda` for `distopt._cuda`, and the libraries that stand in."""
    loaded = sys.modules.get("distopt._cuda")
    path = build.cuda_module()
    if loaded is not None and loaded.__file__ == str(path):
        return
    if loaded is not None or "cupy" in sys.modules:
        raise RuntimeError("this process has loaded the real CUDA or CuPy already; activate in a process of its own")
    spec = importlib.util.spec_from_file_location("distopt._cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distopt._cuda"] = module
    spec.loader.exec_module(module)
    if "distopt" in sys.modules:
        sys.modules["distopt"]._cuda = module  # type: ignore[attr-defined]
    ctypes.CDLL(str(path), os.RTLD_NOLOAD | os.RTLD_GLOBAL)  # the stand-in for NCCL takes its streams from there
    sys.path.insert(0, str(Path(__file__).parent))  # has the packages cupy and cudnn
    os.environ["DISTOPT_NCCL_LIBRARY"] = str(build.NCCL)
    os.environ["DISTOPT_CUBLAS_LIBRARY"] = str(build.CUBLAS)
