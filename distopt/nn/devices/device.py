"""Devices: each has an array module, random generators and a profile of its operations.

Method names follow SINGA.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from ...errors import MissingDependencyError, UsageError, check_integer, pip_install
from ...settings import Settings

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

T = TypeVar("T")
_INSTALL = f"{pip_install('cuda13')} (with a driver for CUDA 12: cupy-cuda12x and so on)"

_log = logging.getLogger("distopt")


class Device:
    """A CPU or a GPU.

    Args:
        kind: "cpu" or "cuda".
        index: number of the device within its kind.
        xp: the array module, numpy or cupy.

    Attributes:
        kind: as given.
        xp: as given.
        host_rng: NumPy generator for initial parameters, so that a seed gives the same ones on every device. On the
            CPU, the same object as `rng`.
        recording: the pass of a training step that is being captured, "forward" or "backward", or empty.
        graph_generation: incremented when recorded steps become invalid.
        verbosity: if 1 or more, every operation is timed.
    """

    def __init__(self, kind: str, index: int, xp: ModuleType) -> None:
        self.kind = kind
        self.xp: Any = xp
        self._rng = self.xp.random.default_rng()
        self.host_rng = self._rng if kind == "cpu" else np.random.default_rng()
        self.recording = ""
        self.graph_generation = 0
        self.verbosity = 0
        self._index = index
        self._skip = 0
        self._graph = False
        self._profile: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        return f"{self.kind}:{self._index}"

    @property
    def rng(self) -> Any:
        """Random generator of this device's array module, used for dropout masks.

        Raises:
            UsageError: a training step is being captured; every replay would draw the same numbers.
        """
        if self.recording:
            raise UsageError("random numbers, such as those of dropout, would be the same in every replay of a graph")
        return self._rng

    def id(self) -> int:
        """Number of the device within its kind."""
        return self._index

    def lang(self) -> str:
        """SINGA's name for the kind: "kCpp" or "kCuda"."""
        return "kCpp" if self.kind == "cpu" else "kCuda"

    def SetRandSeed(self, seed: int) -> None:  # noqa: N802 - the methods in capitals are SINGA's
        """Seed `rng` and `host_rng`, which makes parameters and dropout masks reproducible.

        Raises:
            UsageError: the seed is not an integer of at least 0.
        """
        seed = check_integer("the seed of random numbers", seed, 0)
        self._rng = self.xp.random.default_rng(seed)
        self.host_rng = self._rng if self.kind == "cpu" else np.random.default_rng(seed)

    def Sync(self) -> None:  # noqa: N802
        """Wait until the device has finished all its work. On the CPU, return at once."""
        if self.kind == "cuda":
            self.xp.cuda.Device(self._index).synchronize()
            self.check()

    def host(self, array: Any) -> Any:
        """The values of `array` on this device as a NumPy array; on the CPU, `array` itself.

        Raises:
            UsageError: see `check`.
        """
        if self.kind == "cpu":
            return array
        values = self.xp.asnumpy(array)
        self.check()
        return values

    def check(self) -> None:
        """Raise errors found by kernels that have finished. On a GPU, errors are detected only here, to avoid waiting.

        Raises:
            UsageError: a label of a cross entropy was out of range; its loss and gradients are NaN.
        """
        if self.kind == "cuda" and self._index in _label_flags:
            _label_flags[self._index].check()

    # -- profile -----------------------------------------------------------------------------------------------------
    def SetVerbosity(self, verbosity: int) -> None:  # noqa: N802
        """Time every operation if `verbosity` is 1 or more; on a GPU, this waits for each operation.

        Meanwhile, steps are not replayed.
        """
        self.verbosity = verbosity

    def SetSkipIteration(self, iterations: int) -> None:  # noqa: N802
        """Exclude the first `iterations` calls of each operation from the profile, as warm-up."""
        self._skip = check_integer("iterations", iterations, 0)

    def timed(self, name: str, call: Callable[..., T], *args: Any) -> T:
        """The result of `call(*args)`, with its time added to the profile as one call of operation `name`."""
        start = perf_counter()
        result = call(*args)
        self.Sync()
        self._profile.setdefault(name, []).append(perf_counter() - start)
        return result

    def PrintTimeProfiling(self) -> str:  # noqa: N802
        """Log and return the profile: calls, total time and mean time of each operation. The log level is INFO."""
        lines = [f"time of operations on {self!r}, without the first {self._skip} calls of each"]
        for name, times in sorted(self._profile.items()):
            if times := times[self._skip :]:
                total = math.fsum(times)
                mean_us = total / len(times) * 1e6
                lines.append(f"{name:32} {len(times):8} calls {total * 1e3:10.3f} ms {mean_us:10.1f} us each")
        text = "\n".join(lines)
        _log.info("%s", text)
        return text

    # -- graph -------------------------------------------------------------------------------------------------------
    def EnableGraph(self, enabled: bool) -> None:  # noqa: N802
        """Whether models on this device record and replay training steps; see `distopt.nn.replay.graphs`.

        Args:
            enabled: any value, taken as Python takes its truth: SINGA's scripts pass the text "True".
        """
        self._graph = bool(enabled)

    def graph_enabled(self) -> bool:
        """The last argument of `EnableGraph`."""
        return self._graph

    def ResetGraph(self) -> None:  # noqa: N802
        """Discard all recorded training steps; models record them again."""
        self.graph_generation += 1


class LabelFlag:
    """Host memory in which GPU kernels record a label that is out of range.

    Attributes:
        address: device-accessible address of four int64: whether one was found, its sample, the label, the number of
            classes.
    """

    def __init__(self, cupy: Any) -> None:
        memory = cupy.cuda.alloc_pinned_memory(32)
        self.address: int = memory.ptr
        self._values = np.frombuffer(memory, np.int64, 4)
        self._values[:] = 0

    def check(self) -> None:
        """Raise an error if a label was recorded, once.

        Raises:
            UsageError: a label was out of range.
        """
        found, sample, label, classes = self._values.tolist()
        if found:
            self._values[0] = 0
            raise UsageError(f"label {label} of sample {sample} is outside 0 ... {classes - 1}")


_label_flags: dict[int, LabelFlag] = {}


def label_flag(index: int) -> LabelFlag:
    """Local. The flag of GPU `index`, which must be the current one."""
    if index not in _label_flags:
        import cupy

        _label_flags[index] = LabelFlag(cupy)
    return _label_flags[index]


_cpu = Device("cpu", 0, np)
_gpus: dict[int, Device] = {}
_told: set[str] = set()


def get_default_device() -> Device:
    """The CPU. All calls return the same object."""
    return _cpu


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
    device, missing = find_gpu(device_id)
    if device is not None:
        return device
    if missing:
        tell_once(f"using the CPU: {missing} (DISTOPT_DEVICE=cpu stops this notice)")
    return _cpu


def enable_lazy_alloc(enable: bool) -> None:
    """Accepted for SINGA's scripts, and ignored: a tensor's memory is taken when the tensor is made."""


def device_of(array: Any) -> Device:
    """Local. The device that holds the memory of `array`; the CPU for anything but a CuPy array."""
    cupy = sys.modules.get("cupy")
    if cupy is None or isinstance(array, np.ndarray) or not isinstance(array, cupy.ndarray):
        return _cpu
    index = array.device.id
    return _gpus[index] if index in _gpus else _gpu(cupy, index)


def gpu_is_usable() -> bool:
    """Local. Whether `create_cuda_gpu` would return a GPU.

    This loads CUDA's driver, which does not work any more in processes forked afterwards.
    """
    return Settings.from_env().device != "cpu" and find_cupy()[0] is not None


def get_num_gpus() -> int:
    """Number of GPUs that `create_cuda_gpu_on` accepts, 0 if it would return the CPU; see `gpu_is_usable`."""
    return find_cupy()[0].cuda.runtime.getDeviceCount() if gpu_is_usable() else 0


def get_gpu_ids() -> list[int]:
    """Their numbers, from 0."""
    return [*range(get_num_gpus())]


def tell_once(text: str) -> None:
    """Local. Log `text` as a warning, unless this process has done so before."""
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


def find_gpu(device_id: int) -> tuple[Device | None, str]:
    """Local. Like `create_cuda_gpu_on`, but without a notice: if no GPU can be used, None and what is missing.

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
            return _gpu(cupy, device_id), ""
        except (RuntimeError, MemoryError) as error:
            cure = "end the processes that nvidia-smi lists, or choose another by CUDA_VISIBLE_DEVICES"
            missing = f"GPU {device_id} cannot be used ({error}); {cure}"
    if wish == "cuda":
        raise MissingDependencyError(f"DISTOPT_DEVICE=cuda, but {missing}")
    return None, missing


def _gpu(cupy: Any, index: int) -> Device:
    cupy.cuda.Device(index).use()
    if index not in _gpus:
        _gpus[index] = Device("cuda", index, cupy)
    return _gpus[index]


def find_cupy() -> tuple[Any, str]:
    """Local. CuPy if it sees a GPU that distopt can use; otherwise None, and what is missing and how to fix it."""
    try:
        import_module("distopt._cuda")
    except ImportError as error:
        return None, (
            f"distopt was built without _cuda ({error}); install the CUDA toolkit (nvcc), then distopt again with "
            "DISTOPT_CUDA=ON (docs/gpu.md)"
        )
    try:
        import cupy
    except ImportError as error:
        return None, f"CuPy cannot be imported ({error}); {_INSTALL}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"no GPU answers ({error}); install NVIDIA's driver, or a newer one, or check CUDA_VISIBLE_DEVICES"
    return cupy, ""


def find_cudnn() -> tuple[Any, str]:
    """Local. cuDNN's Python package if it has found cuDNN; otherwise None, and what is missing and how to fix it.

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
