"""SINGA's `device` module."""

from __future__ import annotations

from collections.abc import Iterable

from ..checks import check_integer, explain_absent
from ..kernels.discovery import find_cupy
from ..nn.devices.device import Device, get_default_device
from ..nn.devices.discovery import gpu_is_usable, gpu_or_cpu
from ..nn.staging import Staging

__all__ = [
    "Device",
    "Staging",
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

create_cpu_device = get_default_device


def create_cuda_gpu() -> Device:
    """The first GPU that is visible; see `create_cuda_gpu_on`."""
    return create_cuda_gpu_on(0)


def create_cuda_gpus_on(device_ids: Iterable[int]) -> list[Device]:
    """`create_cuda_gpu_on` of each number; the last of the GPUs becomes the current one."""
    return [create_cuda_gpu_on(device_id) for device_id in device_ids]


def create_cuda_gpus(count: int) -> list[Device]:
    """The first `count` GPUs that are visible; see `create_cuda_gpus_on`."""
    return create_cuda_gpus_on(range(check_integer("the number of GPUs", count, 0)))


def create_cuda_gpu_on(device_id: int) -> Device:
    """GPU number `device_id` of those visible to this process; it becomes the current one.

    If no GPU can be used, this returns the CPU and logs once what is missing. `DISTOPT_DEVICE=cpu` selects the CPU
    without a notice; `DISTOPT_DEVICE=cuda` makes a missing GPU an error.

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: there are GPUs, but none with this number.
    """
    return gpu_or_cpu(device_id)


def enable_lazy_alloc(enable: bool) -> None:
    """Accepted for SINGA's scripts, and ignored: a tensor's memory is taken when the tensor is made."""


def get_num_gpus() -> int:
    """Number of GPUs that `create_cuda_gpu_on` accepts, 0 if it would return the CPU; see `gpu_is_usable`."""
    return find_cupy()[0].cuda.runtime.getDeviceCount() if gpu_is_usable() else 0


def get_gpu_ids() -> list[int]:
    """The numbers of the GPUs that `get_num_gpus` counts, from 0."""
    return [*range(get_num_gpus())]


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
