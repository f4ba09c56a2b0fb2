"""SINGA's `device` module."""

from __future__ import annotations

from .errors import explain_absent
from .nn.devices.device import *  # noqa: F403 - a face of that module
from .nn.devices.device import __all__

_ABSENT = {
    **dict.fromkeys(
        ("create_opencl_device", "get_num_opencl_devices", "get_num_opencl_platforms"),
        "OpenCL is not supported; use create_cuda_gpu or create_cpu_device",
    ),
    **dict.fromkeys(
        ("device_query", "get_gpu_mem_size"), "ask CuPy: cupy.cuda.runtime.getDeviceProperties(id) and memGetInfo()"
    ),
}

explain_absent(globals(), __all__, _ABSENT)
