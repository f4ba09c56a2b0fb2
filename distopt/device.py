"""SINGA's `device` module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import absent_name
from .nn.device import (
    Device,
    create_cpu_device,
    create_cuda_gpu,
    create_cuda_gpu_on,
    create_cuda_gpus,
    create_cuda_gpus_on,
    get_default_device,
    get_gpu_ids,
    get_num_gpus,
)

__all__ = [
    "Device",
    "create_cpu_device",
    "create_cuda_gpu",
    "create_cuda_gpu_on",
    "create_cuda_gpus",
    "create_cuda_gpus_on",
    "enable_lazy_alloc",
    "get_default_device",
    "get_gpu_ids",
    "get_num_gpus",
]


def enable_lazy_alloc(enable: bool) -> None:
    """Accepted for SINGA's scripts, and ignored: a tensor's memory is taken when the tensor is made."""


_ABSENT = {
    **dict.fromkeys(
        ("create_opencl_device", "get_num_opencl_devices", "get_num_opencl_platforms"),
        "OpenCL is not supported; use create_cuda_gpu or create_cpu_device",
    ),
    **dict.fromkeys(
        ("device_query", "get_gpu_mem_size"), "ask CuPy: cupy.cuda.runtime.getDeviceProperties(id) and memGetInfo()"
    ),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise absent_name(__name__, name, __all__, _ABSENT)
