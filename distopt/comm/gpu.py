"""Requirements of communication between GPUs, and which rank uses which GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import LaunchError, MissingDependencyError, UsageError, WireMemoryError, pip_install
from ..kernels.discovery import find_cupy
from ..launch.job.base import Job
from ..launch.job.topology import Topology, boot_id
from ..settings import Settings
from .types import storage_of

_LIBRARY = "DISTOPT_NCCL_LIBRARY"
# From this version on, NCCL can let two ranks share a GPU.
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_MULTI_RANK, _MULTI_RANK_VERSION = "NCCL_MULTI_RANK_GPU_ENABLE", 23000


@dataclass(frozen=True)
class GpuStack:
    """The components that were found.

    Attributes:
        cupy: the module `cupy`.
        nccl_path: absolute path of NCCL.
        nccl_version: 10000 * major + 100 * minor + patch.
    """

    cupy: Any
    nccl_path: str
    nccl_version: int


def order_launches() -> None:
    """Local. Let NCCL order the kernels of all communicators of a GPU as the host launches them; before its first use.

    Equal orders on all hosts do not suffice: the device may run the kernels of two communicators in another order, on
    one GPU only, and each then waits for the other. A value that the user has set stays. NCCL 2.26 and later read it.
    """
    os.environ.setdefault(_LAUNCH_ORDER, "1")


def device_memory(cupy: Any, topology: Topology, device_id: int, count: int, dtype: str) -> Any:
    """Local. An uninitialised flat array of a wire type on the current GPU, which is number `device_id`.

    Raises:
        WireMemoryError: it does not fit.
    """
    try:
        return cupy.empty(count, storage_of(dtype))
    except MemoryError as error:
        raise WireMemoryError(
            f"rank {topology.rank} ({topology.host}): {count} elements of {dtype} do not fit on GPU {device_id}; use a "
            "smaller model or batch"
        ) from error


def check_device(topology: Topology, device_id: int, arrays: Sequence[Any]) -> None:
    """Local. Check that arrays of CuPy are on this rank's GPU.

    Raises:
        UsageError: one is on another.
    """
    if others := {array.data.device_id for array in arrays} - {device_id}:
        raise UsageError(
            f"rank {topology.rank} ({topology.host}) works on GPU {device_id}; an array on GPU {others.pop()} cannot "
            "be sent, copy it first"
        )


def driver_version() -> int:
    """Local. The CUDA version that NVIDIA's driver supports, 1000 * major + 10 * minor; 0 without a driver."""
    try:
        return _core.cuda_driver_version()
    except RuntimeError:
        return 0


def gpu_stack() -> GpuStack:
    """Local. Everything that the NCCL communicator requires. Creates no CUDA context.

    Raises:
        MissingDependencyError: something is missing; the message says what, and how to install it.
    """
    cupy, missing = find_cupy()
    if cupy is None:
        raise MissingDependencyError(missing)
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    path = find_nccl(major)
    order_launches()
    try:
        version = _core.nccl_version(path)
    except RuntimeError as error:
        raise MissingDependencyError(f"NCCL cannot be used: {error}; {_nccl_cure(major)}") from error
    return GpuStack(cupy, path, version)


def find_nccl(cuda_major: int, env: Mapping[str, str] | None = None) -> str:
    """Local. Absolute path of libnccl.so.2: `$DISTOPT_NCCL_LIBRARY` or, if unset, the file of the wheel for this CUDA.

    A bare file name would select whichever libnccl this process has already loaded.

    Args:
        cuda_major: major CUDA version that CuPy was built for.
        env: the environment (default: that of the process).

    Raises:
        MissingDependencyError: it was not found.
    """
    if named := Settings.from_env(env).nccl_library:
        if not Path(named).is_file():
            raise MissingDependencyError(f"{_LIBRARY}={named} is not a file; give the path of libnccl.so.2 or unset it")
        return str(Path(named).resolve())
    package = f"nvidia-nccl-cu{cuda_major}"
    try:
        path = Path(str(distribution(package).locate_file("nvidia/nccl/lib/libnccl.so.2")))
    except PackageNotFoundError:
        raise MissingDependencyError(f"{package} is not installed; {_nccl_cure(cuda_major)}") from None
    if not path.is_file():
        raise MissingDependencyError(f"{package} is installed without its libnccl.so.2; {_nccl_cure(cuda_major)}")
    return str(path.resolve())


def dotted_version(version: int) -> str:
    """NCCL's version number as text: 22705 is 2.27.5."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _nccl_cure(cuda_major: int) -> str:
    return f"{pip_install(f'cuda{cuda_major}')}, or set {_LIBRARY} to the path of a libnccl.so.2"


# -- choice of GPUs ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GpuOfRank:
    """The location of a rank, as reported by the rank.

    Attributes:
        machine: identity of the machine, shared by its containers.
        host: name of the host.
        pid: process id.
        gpus: PCI bus ids of the GPUs visible to the process, in its own numbering.
        chosen: number of the GPU that the rank is to use, if that is known.
    """

    machine: str
    host: str
    pid: int
    gpus: Sequence[str]
    chosen: int | None


def exchange_places(job: Job, stack: GpuStack, device: int | None = None) -> list[GpuOfRank]:
    """Collective. The places of all ranks, in rank order, in one exchange.

    Args:
        job: the ranks.
        stack: what was found here.
        device: number of the GPU that this rank is to use (default: the current one, if that is not number 0, which is
            current in a process that has chosen none).
    """
    cuda = stack.cupy.cuda
    gpus = [str(cuda.Device(device).pci_bus_id) for device in range(cuda.runtime.getDeviceCount())]
    chosen = (int(cuda.runtime.getDevice()) or None) if device is None else device
    mine = GpuOfRank(boot_id(), job.topology.host, os.getpid(), gpus, chosen)
    return [GpuOfRank(**place) for place in job.exchange(asdict(mine))]


def choose_devices(places: Sequence[GpuOfRank], nccl_version: int, env: Mapping[str, str] | None = None) -> list[int]:
    """Local. For each rank, the number of the visible GPU that it uses; the result is the same on all ranks.

    A rank keeps the GPU that it has chosen. The other ranks of a machine that see the same GPUs divide them among
    themselves in rank order, so it works both if all ranks see all GPUs and if each sees its own, as with
    `srun --gpus-per-task`. Where that GPU is one that another rank has chosen, a rank uses the first one that is left:
    it may have chosen number 0, which cannot be seen.

    Args:
        places: the places of all ranks.
        nccl_version: as in `GpuStack`.
        env: the environment (default: that of the process).

    Raises:
        LaunchError: two ranks would use the same GPU, which NCCL does not support; the message names both.
    """
    env = os.environ if env is None else env
    may_share = nccl_version >= _MULTI_RANK_VERSION and env.get(_MULTI_RANK) == "1"
    devices = [-1] * len(places)
    users: dict[tuple[str, str], int] = {}
    order = sorted(range(len(places)), key=lambda rank: places[rank].chosen is None)  # first those that chose
    for rank in order:
        place = places[rank]
        device = place.chosen
        if device is None:
            before = sum((other.machine, other.gpus) == (place.machine, place.gpus) for other in places[:rank])
            device = default = before % len(place.gpus)
            taken = users.get((place.machine, place.gpus[default]))
            if taken is not None and places[taken].chosen is not None and not may_share:
                free = [n for n, gpu in enumerate(place.gpus) if (place.machine, gpu) not in users]
                device = free[0] if free else default
        first = users.setdefault((place.machine, place.gpus[device]), rank)
        if first != rank and not may_share:
            first, second = sorted((first, rank))
            raise LaunchError(
                f"ranks {first} and {second} on {place.host} (pids {places[first].pid} and {places[second].pid}) would "
                f"both use GPU {place.gpus[device]}, of {len(place.gpus)} that rank {rank} sees; start no more ranks "
                "than GPUs and let all see all of them (CUDA_VISIBLE_DEVICES), or each its own (srun "
                "--gpus-per-task=1); a script that chooses GPUs itself gives each local rank its own"
            )
        devices[rank] = device
    return devices


def refusal(job: Job) -> str:
    """Collective. Why a rank has no GPU that it can use, with the cure, the same on all ranks; empty if each has one.

    Raises:
        MissingDependencyError: as `gpu_stack`.
    """
    stack = gpu_stack()
    places, rank, own = exchange_places(job, stack), job.topology.rank, ""
    try:
        device = choose_devices(places, stack.nccl_version)[rank]
    except LaunchError as error:
        return str(error)
    try:
        stack.cupy.cuda.Device(device).use()
        stack.cupy.empty(1)  # makes the context, which another process may forbid
    except (RuntimeError, MemoryError) as error:
        cure = "end the processes that nvidia-smi lists, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        own = f"rank {rank} ({job.topology.host}) cannot use GPU {places[rank].gpus[device]} ({error}); {cure}"
    return next((reason.decode() for reason in job.all_gather(own.encode()) if reason), "")
