"""What a rank needs to communicate between GPUs, where it is, and which GPU belongs to which rank."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError, MissingDependencyError
from ..settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .job import Job

__all__ = [
    "GpuStack",
    "Place",
    "choose_devices",
    "dotted_version",
    "exchange_places",
    "find_nccl",
    "gpu_stack",
    "has_gpu",
]

_LIBRARY = "DISTOPT_NCCL_LIBRARY"
# NCCL lets two ranks share a GPU from this version on, if it is told to.
_MULTI_RANK, _MULTI_RANK_VERSION = "NCCL_MULTI_RANK_GPU_ENABLE", 23000


@dataclass(frozen=True)
class GpuStack:
    """What was found.

    Attributes:
        cuda: the module `distopt._cuda`.
        cupy: the module `cupy`.
        nccl_path: absolute path of NCCL.
        nccl_version: 10000 * major + 100 * minor + patch.
    """

    cuda: Any
    cupy: Any
    nccl_path: str
    nccl_version: int


def gpu_stack() -> GpuStack:
    """Local. Everything that the NCCL communicator stands on; creates no CUDA context.

    Raises:
        MissingDependencyError: something is missing; the message says what, and the cure.
    """
    try:
        cuda = import_module("distopt._cuda")
    except ImportError as error:
        raise MissingDependencyError(
            f"distopt was built without CUDA ({error}); install the CUDA toolkit with nvcc, then install distopt again"
        ) from error
    try:
        count = cuda.device_count()
    except RuntimeError as error:
        raise MissingDependencyError(
            f"no GPU answers ({error}); install NVIDIA's driver, or check CUDA_VISIBLE_DEVICES"
        ) from error
    if count == 0:
        raise MissingDependencyError("no GPU is visible to this process; check CUDA_VISIBLE_DEVICES")
    built_for = cuda.runtime_version() // 1000
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise MissingDependencyError(
            f"CuPy cannot be imported ({error}); pip install 'distopt[cuda{built_for}]'"
        ) from error
    path = find_nccl(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    try:
        version = cuda.nccl_version(path)
    except RuntimeError as error:
        raise MissingDependencyError(f"NCCL cannot be used: {error}; {_nccl_cure(built_for)}") from error
    return GpuStack(cuda, cupy, path, version)


def has_gpu() -> bool:
    """Local. Whether a GPU answers; False where distopt was built without CUDA, too."""
    try:
        found: int = import_module("distopt._cuda").device_count()
    except (ImportError, RuntimeError):
        return False
    return found > 0


def find_nccl(cuda_major: int, env: Mapping[str, str] | None = None) -> str:
    """Local. Absolute path of libnccl.so.2: `$DISTOPT_NCCL_LIBRARY`, else that of the wheel for this CUDA.

    A bare name would give whichever libnccl this process has loaded already.

    Args:
        cuda_major: the CUDA for which CuPy was built.
        env: the environment (default: that of the process).

    Raises:
        MissingDependencyError: there is none.
    """
    if named := Settings.from_env(env).nccl_library:
        if not Path(named).is_file():
            raise MissingDependencyError(f"{_LIBRARY}={named} is no file; give the path of a libnccl.so.2, or unset it")
        return str(Path(named).resolve())
    package = f"nvidia-nccl-cu{cuda_major}"
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise MissingDependencyError(f"{package} is not installed; {_nccl_cure(cuda_major)}") from None
    found = (Path(str(file.locate())).resolve() for file in files if file.name == "libnccl.so.2")
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise MissingDependencyError(f"{package} is installed without its libnccl.so.2; {_nccl_cure(cuda_major)}")
    return str(path)


def dotted_version(version: int) -> str:
    """NCCL's 22705 as 2.27.5."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _nccl_cure(cuda_major: int) -> str:
    return f"pip install 'distopt[cuda{cuda_major}]', or set {_LIBRARY} to the path of a libnccl.so.2"


# -- who has which GPU -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where a rank is, as it says itself.

    Attributes:
        machine: identity of the machine; containers on one machine have the same.
        host: its name.
        pid: process id.
        gpus: PCI bus ids of the GPUs that the process sees, in its own numbering.
        current: number of the one that is current.
    """

    machine: str
    host: str
    pid: int
    gpus: tuple[str, ...]
    current: int


def exchange_places(job: Job, stack: GpuStack) -> list[Place]:
    """Collective. The places of all ranks, in rank order; one exchange."""
    gpus = tuple(stack.cuda.pci_bus_id(device) for device in range(stack.cuda.device_count()))
    current = int(stack.cupy.cuda.runtime.getDevice())
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mine = Place(machine, job.topology.host, os.getpid(), gpus, current)
    return [_decode(rank, payload) for rank, payload in enumerate(job.all_gather(json.dumps(asdict(mine)).encode()))]


def _decode(rank: int, payload: bytes) -> Place:
    try:
        fields = json.loads(payload)
        return Place(**{**fields, "gpus": tuple(fields["gpus"])})
    except (ValueError, TypeError, KeyError):
        raise LaunchError(
            f"rank {rank} does not say which GPUs it sees; install the same version of distopt everywhere"
        ) from None


def choose_devices(places: Sequence[Place], nccl_version: int, env: Mapping[str, str] | None = None) -> list[int]:
    """Local. Which of the GPUs that it sees each rank takes, alike on all ranks.

    A GPU that the script has made current stays, unless it is number 0, which is current from the start. Other ranks
    share the GPUs that they see with the ranks of their machine that see the same, in order: all of them see all, or
    each sees its own, as `srun --gpus-per-task` does it.

    Args:
        places: of all ranks.
        nccl_version: as in `GpuStack`.
        env: the environment (default: that of the process).

    Raises:
        LaunchError: two ranks would have the same GPU, which NCCL does not support; the message names both.
    """
    env = os.environ if env is None else env
    may_share = nccl_version >= _MULTI_RANK_VERSION and env.get(_MULTI_RANK) == "1"
    devices: list[int] = []
    users: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        before = sum((other.machine, other.gpus) == (place.machine, place.gpus) for other in places[:rank])
        device = place.current or before % len(place.gpus)
        first = users.setdefault((place.machine, place.gpus[device]), rank)
        if first != rank and not may_share:
            raise LaunchError(
                f"ranks {first} and {rank} on {place.host} (pids {places[first].pid} and {place.pid}) would both use "
                f"GPU {place.gpus[device]}, of {len(place.gpus)} that rank {rank} sees; start no more ranks than GPUs "
                "and let all see all of them (CUDA_VISIBLE_DEVICES), or each its own (srun --gpus-per-task=1)"
            )
        devices.append(device)
    return devices
