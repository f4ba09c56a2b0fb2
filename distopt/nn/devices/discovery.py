"""Which GPUs this process can use, and what is missing where it can use none."""

from __future__ import annotations

from ...checks import check_integer
from ...errors import MissingDependencyError, UsageError
from ...kernels.discovery import find_cupy
from ...settings import Settings
from ..notices import log_once
from .device import Device, get_default_device, gpu


def gpu_is_usable() -> bool:
    """Whether `gpu_or_cpu` would return a GPU.

    This loads CUDA's driver. Processes that are forked afterwards cannot use CUDA.
    """
    return Settings.from_env().device != "cpu" and find_cupy()[0] is not None


def gpu_or_cpu(device_id: int, *, log: bool = True) -> Device:
    """GPU number `device_id` of those visible to this process, which becomes the current one.

    If no GPU can be used, this is the CPU, and the log says once what is missing. `DISTOPT_DEVICE=cpu` selects the CPU
    without a notice.

    Args:
        device_id: from 0.
        log: whether to log that.

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: there are GPUs, but none with this number.
    """
    wish = Settings.from_env().device
    if wish == "cpu":
        return get_default_device()
    cupy, missing = find_cupy()
    if cupy is not None:
        seen, device_id = cupy.cuda.runtime.getDeviceCount(), check_integer("device_id", device_id)
        if not 0 <= device_id < seen:
            raise UsageError(f"there is no GPU {device_id}: {seen} visible (numbered from 0), see CUDA_VISIBLE_DEVICES")
        try:
            return gpu(cupy, device_id)
        except (RuntimeError, MemoryError) as error:
            cure = "end the processes that nvidia-smi lists, or choose another by CUDA_VISIBLE_DEVICES"
            missing = f"GPU {device_id} cannot be used ({error}); {cure}"
    if wish == "cuda":
        raise MissingDependencyError(f"DISTOPT_DEVICE=cuda, but {missing}")
    if log:
        log_once(f"using the CPU: {missing} (DISTOPT_DEVICE=cpu stops this notice)")
    return get_default_device()
