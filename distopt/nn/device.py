"""Where arrays live: a device has the array module, the random generator and the profile of its operations.

Module and method names are SINGA's.
"""

from __future__ import annotations

import logging
import math
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import MissingDependencyError, UsageError
from ..settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = [
    "Device",
    "create_cpu_device",
    "create_cuda_gpu",
    "create_cuda_gpu_on",
    "find_cudnn",
    "find_cupy",
    "find_gpu",
    "get_default_device",
    "label_flag",
    "tell_once",
]

T = TypeVar("T")

_log = logging.getLogger("distopt")


class Device:
    """A CPU or a GPU.

    Args:
        kind: "cpu" or "cuda".
        index: number of the device among its kind.
        xp: the array module, numpy or cupy.

    Attributes:
        kind: as given.
        xp: as given.
        host_rng: generator of NumPy; initial parameters are drawn from it, so that a seed gives the same ones on every
            device. On the CPU it is `rng`.
        recording: which pass of a training step is captured at the moment, "forward" or "backward"; else empty.
        graph_generation: grows when recorded steps are of no use any more.
        verbosity: with 1 or more, the time of every operation is measured.
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
        """Generator of this device's module; dropout masks are drawn from it.

        Raises:
            UsageError: a training step is being captured, and its replays would draw the same numbers again.
        """
        if self.recording:
            raise UsageError("random numbers, such as those of dropout, would be the same in every replay of a graph")
        return self._rng

    def id(self) -> int:
        """Number of the device among its kind."""
        return self._index

    def lang(self) -> str:
        """SINGA's name of the kind: "kCpp" or "kCuda"."""
        return "kCpp" if self.kind == "cpu" else "kCuda"

    def SetRandSeed(self, seed: int) -> None:  # noqa: N802 - the methods in capitals are SINGA's
        """Start `rng` and `host_rng` anew from `seed`: parameters and dropout masks are the same on every run."""
        self._rng = self.xp.random.default_rng(seed)
        self.host_rng = self._rng if self.kind == "cpu" else np.random.default_rng(seed)

    def Sync(self) -> None:  # noqa: N802
        """Return when all work handed to the device is done; at once on the CPU, where calls return finished."""
        if self.kind == "cuda":
            self.xp.cuda.Device(self._index).synchronize()
            self.check()

    def host(self, array: Any) -> Any:
        """The values of `array`, of this device, as a NumPy array; the array itself on the CPU.

        Raises:
            UsageError: see `check`.
        """
        if self.kind == "cpu":
            return array
        values = self.xp.asnumpy(array)
        self.check()
        return values

    def check(self) -> None:
        """Raise what kernels have found wrong, as far as they have run: on a GPU nobody waits to find out earlier.

        Raises:
            UsageError: a label of a cross entropy was no class; its loss and gradients are NaN.
        """
        if self.kind == "cuda" and self._index in _label_flags:
            _label_flags[self._index].check()

    # -- profile -----------------------------------------------------------------------------------------------------
    def SetVerbosity(self, verbosity: int) -> None:  # noqa: N802
        """Measure the time of every operation if `verbosity` is 1 or more; on a GPU that waits for each of them.

        No step is replayed meanwhile.
        """
        self.verbosity = verbosity

    def SetSkipIteration(self, iterations: int) -> None:  # noqa: N802
        """Leave the first calls of each operation, at most `iterations`, out of the profile, as they warm up."""
        self._skip = iterations

    def timed(self, name: str, call: Callable[..., T], *args: Any) -> T:
        """The result of `call(*args)`, with its time added to the profile as one call of operation `name`."""
        start = perf_counter()
        result = call(*args)
        self.Sync()
        self._profile.setdefault(name, []).append(perf_counter() - start)
        return result

    def PrintTimeProfiling(self) -> str:  # noqa: N802
        """Log the profile at level INFO, and return it: calls, and total and mean time of each operation."""
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
        """Whether models on this device record and replay training steps; see `distopt.nn.replay.graphs`."""
        self._graph = enabled

    def graph_enabled(self) -> bool:
        """What `EnableGraph` was last given."""
        return self._graph

    def ResetGraph(self) -> None:  # noqa: N802
        """Drop all recorded training steps; models record theirs anew."""
        self.graph_generation += 1


class LabelFlag:
    """Host memory in which the kernels of a GPU note a label that is no class.

    Attributes:
        address: of four int64 that the device reaches: whether there was one, its sample, the label, the classes.
    """

    def __init__(self, cupy: Any) -> None:
        memory = cupy.cuda.alloc_pinned_memory(32)
        self.address: int = memory.ptr
        self._values = np.frombuffer(memory, np.int64, 4)
        self._values[:] = 0

    def check(self) -> None:
        """Raise the note, once.

        Raises:
            UsageError: there is one.
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
    """The CPU. All calls give the same object."""
    return _cpu


def create_cpu_device() -> Device:
    """The CPU. All calls give the same object."""
    return _cpu


def create_cuda_gpu() -> Device:
    """The first GPU that is visible; see `create_cuda_gpu_on`."""
    return create_cuda_gpu_on(0)


def create_cuda_gpu_on(device_id: int) -> Device:
    """GPU number `device_id` of those visible to this process; it becomes the current one.

    Where no GPU can be used this is the CPU, and the log says once what is missing. `DISTOPT_DEVICE=cpu` asks for
    the CPU, without a notice; `DISTOPT_DEVICE=cuda` makes a missing GPU an error.

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: there are GPUs, but not so many.
    """
    device, missing = find_gpu(device_id)
    if device is not None:
        return device
    if missing:
        tell_once(f"using the CPU: {missing} (DISTOPT_DEVICE=cpu stops this notice)")
    return _cpu


def tell_once(text: str) -> None:
    """Local. Log `text` as a warning, unless this process has done so before."""
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


def find_gpu(device_id: int) -> tuple[Device | None, str]:
    """Local. As `create_cuda_gpu_on`, without a notice: no device, and what is missing, where none can be used.

    Raises:
        MissingDependencyError: DISTOPT_DEVICE=cuda and no GPU can be used.
        UsageError: there are GPUs, but not so many.
    """
    wish = Settings.from_env().device
    if wish == "cpu":
        return None, ""
    cupy, missing = find_cupy()
    if cupy is None:
        if wish == "cuda":
            raise MissingDependencyError(f"DISTOPT_DEVICE=cuda, but {missing}")
        return None, missing
    count = cupy.cuda.runtime.getDeviceCount()
    if not 0 <= device_id < count:
        raise UsageError(f"there is no GPU {device_id}: {count} visible (numbered from 0), see CUDA_VISIBLE_DEVICES")
    cupy.cuda.Device(device_id).use()
    if device_id not in _gpus:
        _gpus[device_id] = Device("cuda", device_id, cupy)
    return _gpus[device_id], ""


def find_cupy() -> tuple[Any, str]:
    """Local. CuPy if it sees a GPU that distopt can use, else None and what is missing, with the cure."""
    try:
        import cupy
    except ImportError as error:
        return None, f"CuPy cannot be imported ({error}); pip install 'distopt[cuda12]' or 'distopt[cuda13]'"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, f"no GPU answers ({error}); install NVIDIA's driver, or check CUDA_VISIBLE_DEVICES"
    try:
        import_module("distopt._cuda")
    except ImportError as error:
        return None, f"distopt was built without _cuda ({error}); install the CUDA toolkit (nvcc) and distopt again"
    return cupy, ""


def find_cudnn() -> tuple[Any, str]:
    """Local. cuDNN's Python package if it has found cuDNN, else None and what is missing, with the cure.

    The package looks for libcudnn.so.9 in the folders of LD_LIBRARY_PATH, then in the wheel nvidia-cudnn-cu12 or -cu13.
    """
    cure = "pip install 'distopt[cuda12]' or 'distopt[cuda13]'"
    try:
        import cudnn
    except (ImportError, OSError, AssertionError) as error:  # the latter by two cuDNNs, or one that cannot be loaded
        return None, f"cudnn-frontend cannot be imported ({error}); {cure}"
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        return None, f"cudnn-frontend {cudnn.__version__} finds no libcudnn.so.9 ({error}); {cure}"
    return cudnn, ""
