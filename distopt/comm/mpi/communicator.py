"""Collectives over MPI, for ranks on several hosts.

The description of a collective travels with its data, so that ranks with different collectives raise errors, and
neither corrupt data nor wait forever. MPI moves bytes only: the sums are ours, in rank order, because the order of
MPI_Allreduce is the library's own choice. csrc/mpi does the work, through the library that mpi4py has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ... import _core
from ...errors import CommunicatorError, UsageError, WireMemoryError
from ...launch.end_together.exit_guard import close_at_exit
from ...launch.job.base import Job
from ...launch.job.mpi import MpiJob
from ...launch.rendezvous.mpi import import_mpi
from ..base import Array, Communicator, MessageWork, RaggedWork, Work, storage_of
from ..native import NativeCommunicator
from .messages import MpiMessages
from .waits import Waits

_ALIGNMENT = 64
# Most data that travel with the announcement, for two ranks, and for all ranks together if there are more. They go to
# every rank: with more than two, they cross the network more often than necessary.
_INLINE_BYTES_OF_TWO, _INLINE_BYTES_OF_ALL = 64 << 10, 48 << 10
# UCX copies messages of up to 3 MiB once more where they arrive from TCP. Smaller limits also need more context
# switches if ranks outnumber cores.
CHUNK_BYTES = 4 << 20


Work.register(_core.MpiWork)  # written in C++ for speed
RaggedWork.register(_core.MpiRaggedWork)


class MpiCommunicator(NativeCommunicator):
    """Collectives over an MPI communicator of its own. Progress happens in `done`, `wait` and `progress` only.

    All sums run in rank order, whichever hosts the ranks are on; so they do in subgroups of every job of MPI.
    """

    core: _core.MpiCommunicator
    name: ClassVar[str] = "mpi"
    sends_parts: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True

    @classmethod
    def create(cls, job: Job) -> MpiCommunicator:
        """Collective. Build the communicator of `job`, which must be one of mpiexec."""
        if not isinstance(job, MpiJob):
            raise UsageError(
                f"transport {cls.name!r} cannot serve a {type(job).__name__}; start the script with mpiexec"
            )
        return cls(job)

    def __init__(self, job: MpiJob, *, inline_bytes: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Collective.

        Args:
            job: the job of mpiexec.
            inline_bytes: size of the data that travel with a rank's announcement of an operation (default: 64 KiB for
                two ranks, else 48 KiB divided by their number).
            chunk_bytes: the largest size of a message; larger data are sent in several.
        """
        if inline_bytes is None:
            size = job.topology.world_size
            inline_bytes = _INLINE_BYTES_OF_TWO if size <= 2 else _INLINE_BYTES_OF_ALL // size
        self.topology = job.topology
        self._job = job
        self._mpi = mpi = import_mpi()
        self._waits = Waits(mpi, job)
        self._comm = job.comm.Dup()
        self.core = _core.MpiCommunicator(
            str(mpi.__file__),
            mpi._addressof(self._comm),
            mpi._addressof(mpi.BYTE),
            mpi._sizeof(mpi.Comm),
            mpi._sizeof(mpi.Status),
            job.topology.rank,
            self._waits.processes,
            inline_bytes,
            chunk_bytes,
        )
        self.core.waits = self._waits  # type: ignore[attr-defined]  # read by csrc/bind/mpi.cpp
        self._waits.core = self.core
        self._messages = MpiMessages(mpi, job.comm.Dup(), self._waits)
        self._waits.help = self._messages.advance
        self._farewell: Callable[[], None] = lambda: None  # a subgroup closes its own job
        close_at_exit(self)

    def progress(self) -> None:
        """Local. See `Communicator.progress`; messages move, too."""
        self._messages.progress()

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations of this rank have finished."""
        super().barrier()
        while (oldest := self.core.oldest) is not None:
            self._waits.wait_for(oldest, None)

    def close(self) -> None:
        """Local. Leave; ranks that wait for an operation which this one has not finished get an error. Idempotent."""
        if self.closed:
            return
        self.closed = True
        finalized = self._mpi.Is_finalized()
        if not finalized:
            self._waits.close()
        if self.core.close() and not finalized:
            self._comm.Free()
            self._messages.close()
            self._farewell()

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        # Aligned to cache lines; MPI needs no special memory.
        n_bytes = count * storage_of(dtype).itemsize
        try:
            memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            me = self._waits.me.name
            raise WireMemoryError(f"{me}: {count} elements of {dtype} do not fit into memory") from error
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + n_bytes].view(storage_of(dtype))

    def _subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        job = self._job.subgroup(ranks, key)
        made = MpiCommunicator(job)
        made._farewell = job.close
        return made

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        message = self._messages.make(sends, array, dtype, peer, tag)
        try:
            self.core.progress()  # refuses a communicator that is closed or has failed
            self._messages.start(message)
        except CommunicatorError:  # recorded: the next `done` or `wait` raises it
            if self.closed:
                raise
        return message
