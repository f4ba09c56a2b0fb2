"""How bytes move: one `Communicator` interface over shared memory, MPI, UCX, and NCCL, and over two levels.

`create` selects the communicator of a job from the registry below. The package imports `launch` and `kernels`. It never
knows what its arrays mean: codecs, gradients and models are above it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module

from ..errors import LaunchError, MissingDependencyError, UsageError
from ..launch.job.base import Job
from ..launch.job.mpi import MpiJob
from ..launch.job.topology import Topology
from ..recorder.flight import flight_record
from ..recorder.timeline import timeline
from ..settings import Settings
from .base import Communicator, Work
from .environment import check_same_environment, environment
from .gpu import driver_version, gpu_stack, refusal
from .via_host import ViaHostCommunicator

__all__ = ["TRANSPORTS", "Communicator", "Work", "begin_recording", "create"]

_log = logging.getLogger("distopt")

# A new transport is one file and one line here.
TRANSPORTS = {
    "single": "distopt.comm.single:SingleCommunicator",
    "shm": "distopt.comm.shm:ShmCommunicator",
    "mpi": "distopt.comm.net.mpi:MpiCommunicator",
    "nccl": "distopt.comm.nccl:NcclCommunicator",
    "ucx": "distopt.comm.net.ucx:UcxCommunicator",
    "hierarchical": "distopt.comm.net.hierarchical:HierarchicalCommunicator",
}


def create(job: Job, transport: str | None = None) -> Communicator:
    """Collective. The communicator of `job`.

    Args:
        job: this rank's membership.
        transport: a key of `TRANSPORTS`, or "auto" (default: `$DISTOPT_TRANSPORT`): nothing to do for one rank, NCCL
            where `$DISTOPT_DEVICE` is cuda or each rank can use a GPU (with NVIDIA's driver, a warning says why it
            cannot), else shared memory for ranks of one host, else MPI where mpiexec or srun's plugin has connected the
            ranks, else UCX; between hosts with equally many ranks, both use shared memory inside a host. If
            `$DISTOPT_DEVICE` is cuda, a transport of CPUs that is named sends arrays of GPUs through the host.

    Raises:
        UsageError: no transport has that name.
        LaunchError: the ranks run different versions, or their settings name different transports; or NCCL or a GPU was
            requested, and a rank has no GPU that it can use.
        MissingDependencyError: the transport or the GPU needs something that is absent; the message says what, and the
            cure.
    """
    settings = Settings.from_env()
    wish = choice = transport or settings.transport
    if wish == "auto":
        choice = _choose(job, settings.device)
    if choice not in TRANSPORTS:
        raise UsageError(f"unknown transport {choice!r}; choose auto or one of {', '.join(TRANSPORTS)}")
    if job.topology.world_size > 1:
        check_same_environment(job, environment(choice))
    if choice == "nccl" and (reason := refusal(job)):
        if wish == "nccl" or settings.device == "cuda":
            raise LaunchError(reason)
        _warn(job.topology, reason)
        choice = _choose(job, "cpu")
    module, _, cls = TRANSPORTS[choice].partition(":")
    communicator: Communicator = getattr(import_module(module), cls).create(job)
    if settings.device == "cuda" and choice not in ("nccl", "single"):
        communicator = ViaHostCommunicator(communicator)
    begin_recording(communicator, job, "world", range(job.topology.world_size))
    return communicator


def begin_recording(
    communicator: Communicator, job: Job, name: str, ranks: Sequence[int], begin: Callable[[], object] = lambda: None
) -> None:
    """Collective. Note the operations of a new communicator in the flight record, and begin the timeline.

    Args:
        communicator: of the ranks of `job`.
        job: exchanges what they need.
        name: of the group in the flight record, equal on all ranks.
        ranks: their numbers in the script's job.
        begin: see `Timeline.open`.
    """
    own, offers = job.topology.rank, []
    if len(ranks) > 1:
        offers = job.exchange(flight_record.offer())
    communicator.record(name, ranks, ranks[own], offers)
    if ranks[0] == 0:  # whose clock is the reference
        timeline.open(ranks[own], job.topology.hosts, communicator.all_gather_bytes, begin)


def _choose(job: Job, device: str) -> str:
    topology = job.topology
    if topology.world_size == 1:
        return "single"
    if device == "cuda" or (device == "auto" and _gpus_are_usable(topology)):
        return "nccl"
    if topology.single_host:
        return "shm"
    if not isinstance(job, MpiJob):
        return "ucx"
    sizes = sorted(set(Counter(topology.hosts).values()))
    if len(sizes) == 1:
        return "hierarchical" if sizes[0] > 1 else "mpi"
    if topology.rank == 0:
        _log.info(
            "the hosts have %s ranks: all communication goes through MPI; with equally many on every host, ranks that "
            "share one would use shared memory",
            " or ".join(map(str, sizes)),
        )
    return "mpi"


def _gpus_are_usable(topology: Topology) -> bool:
    """Whether this machine has GPUs and all that NCCL needs. If it has NVIDIA's driver, warn of missing parts."""
    try:
        gpu_stack()
    except MissingDependencyError as error:
        if driver_version():
            _warn(topology, error)
        return False
    return True


def _warn(topology: Topology, reason: object) -> None:
    if topology.rank == 0:
        _log.warning("using the CPU: %s (DISTOPT_DEVICE=cpu stops this notice)", reason)
