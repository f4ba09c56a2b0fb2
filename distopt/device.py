"""SINGA's `device` module."""

from __future__ import annotations

from .errors import explain_absent
from .nn.device import *  # noqa: F403 - a face of that module
from .nn.device import __all__ as _names
from .nn.staging import Staging

__all__ = [*_names, "Staging"]  # noqa: PLE0604 - the names are strings

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
