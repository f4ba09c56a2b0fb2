"""SINGA's `device` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import absent_name
from .nn.device import Device, create_cpu_device, create_cuda_gpu, create_cuda_gpu_on, get_default_device

__all__ = ["Device", "create_cpu_device", "create_cuda_gpu", "create_cuda_gpu_on", "get_default_device"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise absent_name(__name__, name, __all__)
