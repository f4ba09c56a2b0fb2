"""Collectives over MPI, through the library that mpi4py has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ... import _core
from ...errors import UsageError
from ...launch.end_together.exit_guard import after_closing
from ...launch.job.base import Job
from ...launch.job.mpi import MpiJob
from ...launch.rendezvous.mpi import import_mpi
from ..base import Communicator
from .communicator import NetCommunicator
from .network import Network


class MpiNetwork:
    """MPI's communicators, one for each transport.

    Args:
        job: a job of MPI.
        owns_job: whether the job ends with the network.
    """

    # MPICH's UCX copies messages of up to 3 MiB once more where they arrive from TCP. Smaller limits also need more
    # context switches if ranks outnumber cores.
    chunk_bytes = 4 << 20
    is_far = False

    def __init__(self, job: MpiJob, *, owns_job: bool = False) -> None:
        self._mpi = import_mpi()
        self._job = job
        self._owns_job = owns_job
        self._comms: list[Any] = []

    @property
    def has_ended(self) -> bool:
        """Local. Whether MPI has been finalized."""
        return bool(self._mpi.Is_finalized())

    def open(self) -> _core.Transport:
        """Collective. A transport over a duplicate of the MPI communicator of the job."""
        mpi, comm = self._mpi, self._job.comm.Dup()
        self._comms.append(comm)
        return _core.open_mpi(
            str(mpi.__file__),
            mpi._addressof(comm),
            mpi._addressof(mpi.BYTE),
            mpi._sizeof(mpi.Comm),
            mpi._sizeof(mpi.Status),
            _source_offset(mpi),
            mpi.ANY_SOURCE,
        )

    def close(self, read_last: Callable[[], object], *, idle: bool) -> None:
        """Local. Free the MPI communicators of transports, unless messages are under way."""
        if self.has_ended:
            return
        after_closing(read_last)
        if idle:
            del self._comms[0]  # of the notes, which may still be on their way
            while self._comms:
                self._comms.pop().Free()
            if self._owns_job:
                self._job.close()

    def subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        """Collective among `ranks`. Their communicator, over an MPI communicator of their own."""
        job = self._job.subgroup(ranks, key)
        return MpiCommunicator(job, MpiNetwork(job, owns_job=True))


class MpiCommunicator(NetCommunicator):
    """Collectives over MPI communicators of its own. Progress happens in `done`, `wait` and `progress` only."""

    name: ClassVar[str] = "mpi"

    @classmethod
    def create(cls, job: Job) -> MpiCommunicator:
        """Collective. Build the communicator of `job`, which must be one of MPI."""
        return cls(job_of_mpi(job, cls.name))

    def __init__(
        self,
        job: MpiJob,
        network: Network | None = None,
        *,
        inline_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """Collective. The arguments are those of `NetCommunicator`; the default network is a new one of the job."""
        super().__init__(job, network or MpiNetwork(job), inline_bytes=inline_bytes, chunk_bytes=chunk_bytes)


def job_of_mpi(job: Job, transport: str) -> MpiJob:
    """Local. `job`, as the transport needs it.

    Raises:
        UsageError: MPI does not connect its ranks.
    """
    if not isinstance(job, MpiJob):
        raise UsageError(
            f"transport {transport!r} needs ranks that MPI connects, and no MPI launcher started these (this is a "
            f"{type(job).__name__}); start the script with mpiexec, or unset DISTOPT_TRANSPORT"
        )
    return job


def _source_offset(mpi: Any) -> int:
    """Local. Where MPI_SOURCE lies in an MPI_Status of this library."""
    status, found = mpi.Status(), 1 << 20 | 7
    status.source = found
    content = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
    return content.index(found.to_bytes(4, "little"))
