"""How the ranks of a process group are connected: through shared memory on a host, and UCX between hosts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from ..comm import begin_recording
from ..comm.net.ucx import communicator_over_ucx
from ..comm.shm import ShmCommunicator
from ..comm.single import SingleCommunicator
from ..errors import DistoptError
from ..launch.job.multiprocess import refuse_worker
from ..launch.launchers.distopt_run import DISTOPT_RUN
from ..settings import Settings
from .group.arguments import check_timeout
from .group.process_group import DistoptProcessGroup
from .phases import record_phases
from .store_job import StoreJob

if TYPE_CHECKING:
    from ..comm.base import Communicator


def join(options: Any, backend_options: object = None) -> DistoptProcessGroup:
    """Collective. Make the group of the ranks that `options` describes, as `Backend.register_backend` asks for it.

    Args:
        options: PyTorch's `DistributedBackendOptions`.
        backend_options: the `pg_options` of `init_process_group`; the backend has none, and a warning says so.

    Raises:
        DistBackendError: the ranks did not find each other.
        ValueError: the timeout is not positive.
    """
    if backend_options is not None:
        kind = type(backend_options).__qualname__
        warnings.warn(f"pg_options: distopt, which serves this group, has none, and ignores {kind}", stacklevel=2)
    ranks = options.global_ranks_in_group
    if not ranks:  # the default group; ranks of an earlier one may have ended
        StoreJob.known.clear()
        StoreJob.default_store = options.store if _is_served_for_the_job(options.store) else None
        ranks = range(options.group_size)
    return _make(options.store, options.group_rank, ranks, options.group_id, options.timeout)


def _make(store: dist.Store, rank: int, ranks: Sequence[int], name: str, timeout: timedelta) -> DistoptProcessGroup:
    """Collective. Make the group of `ranks`, given by their numbers in the job; this process is `ranks[rank]`."""
    size, seconds = len(ranks), check_timeout(timeout)

    def connect_again(name: str) -> Communicator:
        # A clone, since other threads may use the store now, and it serves one at a time.
        return connected(dist.PrefixStore(name, store.clone()), rank, ranks, seconds, name)[0]

    try:
        communicator, who = connected(store, rank, ranks, seconds, name)
    except DistoptError as error:
        raise DistBackendError(f"rank {rank} of {size}: {error}") from error
    return DistoptProcessGroup(store, rank, size, name, communicator, connect_again, _make, timeout, who)


def connected(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    seconds: float,
    name: str,
    create: Callable[[StoreJob], Communicator] | None = None,
) -> tuple[Communicator, list[str]]:
    """Collective. A communicator of ranks that share a store, and the names of their processes.

    When it returns, no rank needs the store any more, so the rank that serves the store may leave.

    Args:
        store: of these ranks, used for nothing else.
        rank: of this process among them.
        ranks: their numbers in the job.
        seconds: how long an operation waits for a rank.
        name: of the communicator in the flight record, equal on all ranks.
        create: collective; makes the communicator, or gives one of these ranks (default: a new one for arrays on the
            CPU).

    Raises:
        LaunchError: a rank did not come, or cannot use UCX, which the ranks of several hosts need.
        MissingDependencyError: this rank has no UCX, and needs it.
    """
    refuse_worker(_endpoint_of(store))
    job = StoreJob(store, rank, ranks, seconds)
    try:
        communicator = (create or partial(_on_cpus, store))(job)
        try:
            if communicator.flight is None:  # else it is one that others use, too
                begin_recording(communicator, job, name, ranks, record_phases)
            communicator.barrier()  # all have read what is in the store
            job.forget()
            communicator.barrier()
        except BaseException:
            communicator.close()
            raise
    finally:
        job.close()
    return communicator, [process.name for process in job.processes]


def _on_cpus(store: dist.Store, job: StoreJob) -> Communicator:
    """Collective. The communicator of a job for arrays on the CPU."""
    settings = Settings(timeout=job.seconds, stall_warning=Settings.from_env().stall_warning)
    if not job.topology.single_host:
        return communicator_over_ucx(job, _endpoint_of(store)[0], settings)
    if job.topology.world_size == 1:
        return SingleCommunicator(job.topology)
    return ShmCommunicator(job.host_group(), job.topology, settings, ranks=job.numbers)


def _is_served_for_the_job(store: dist.Store) -> bool:
    """Whether rank 0 may serve the store until it ends: `distopt run` has chosen the port. Others may be used again."""
    return DISTOPT_RUN.is_certain(os.environ) and os.environ.get(DISTOPT_RUN.port) == str(_endpoint_of(store)[1])


def _endpoint_of(store: dist.Store) -> tuple[str, int]:
    """Host and port where the store is served; ("", 0) for a store in a file or in memory."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else ("", 0)
