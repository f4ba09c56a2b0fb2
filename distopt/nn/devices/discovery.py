"""Which GPUs and libraries of NVIDIA this process can use, and what is missing where it can use none."""

from __future__ import annotations

from typing import Any

from ...checks import check_integer
from ...errors import MissingDependencyError, UsageError, pip_install
from ...kernels.discovery import find_cupy
from ...settings import Settings
from .device import Device, gpu

_INSTALL = f"{pip_install('cuda13')} (with a driver for CUDA 12: cupy-cuda12x and so on)"


def gpu_is_usable() -> bool:
    """Local. Whether `find_gpu` would return a GPU.

    This loads CUDA's driver. Processes that are forked afterwards cannot use CUDA.
    """
    return Settings.from_env().device != "cpu" and find_cupy()[0] is not None


def find_gpu(device_id: int) -> tuple[Device | None, str]:
    """Local. GPU number `device_id` of those visible to this process, and ""; it becomes the current one.

    If no GPU can be used, or `DISTOPT_DEVICE=cpu` forbids it, None and what is missing ("" if it was forbidden).

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: there are GPUs, but none with this number.
    """
    wish = Settings.from_env().device
    if wish == "cpu":
        return None, ""
    cupy, missing = find_cupy()
    if cupy is not None:
        seen, device_id = cupy.cuda.runtime.getDeviceCount(), check_integer("device_id", device_id)
        if not 0 <= device_id < seen:
            raise UsageError(f"there is no GPU {device_id}: {seen} visible (numbered from 0), see CUDA_VISIBLE_DEVICES")
        try:
            return gpu(cupy, device_id), ""
        except (RuntimeError, MemoryError) as error:
            cure = "end the processes that nvidia-smi lists, or choose another by CUDA_VISIBLE_DEVICES"
            missing = f"GPU {device_id} cannot be used ({error}); {cure}"
    if wish == "cuda":
        raise MissingDependencyError(f"DISTOPT_DEVICE=cuda, but {missing}")
    return None, missing


def find_cudnn() -> tuple[Any, str]:
    """Local. cuDNN's Python package, if it finds the library; otherwise None, and what is missing and how to fix it.

    The package looks for libcudnn.so.9 in the folders of LD_LIBRARY_PATH, then in the wheel nvidia-cudnn-cu12 or -cu13.
    """
    try:
        import cudnn
    except (ImportError, OSError, AssertionError) as error:  # AssertionError: two cuDNNs, or one that cannot be loaded
        return None, f"cudnn-frontend cannot be imported ({error}); {_INSTALL}"
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        return None, f"cudnn-frontend {cudnn.__version__} finds no libcudnn.so.9 ({error}); {_INSTALL}"
    return cudnn, ""
