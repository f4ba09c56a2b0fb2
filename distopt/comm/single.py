"""The communicator of a job of one rank: every collective is over at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CommunicatorClosedError, UsageError, WireMemoryError
from ..launch.job.base import Job
from ..launch.job.topology import Topology
from .base import Array, Communicator, DoneWork, RaggedWork, Request, Work, storage_of


class SingleCommunicator(Communicator):
    """Collectives over one rank, so that a script for one process needs no `if`. Arrays may be NumPy's and CuPy's."""

    name = "single"

    def __init__(self, topology: Topology) -> None:
        if topology.world_size != 1:
            raise UsageError(f"transport single cannot serve {topology.world_size} ranks; choose shm or mpi")
        self.topology = topology

    @classmethod
    def create(cls, job: Job) -> SingleCommunicator:
        """The communicator of a job of one rank."""
        return cls(job.topology)

    def barrier(self) -> None:
        """Return at once."""
        self._require_open()

    def close(self) -> None:
        """Local. Refuse further use; idempotent."""
        self.closed = True

    def _require_open(self) -> None:
        if self.closed:
            raise CommunicatorClosedError("rank 0 has closed this communicator; use it before close()")

    def _moves(self, xp: Any) -> bool:
        return True  # data goes nowhere, so it may be anywhere

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        self._require_open()
        try:
            return xp.empty(count, storage_of(dtype))
        except (MemoryError, ValueError) as error:
            raise WireMemoryError(f"{count} elements of {dtype} do not fit in memory; use a smaller model") from error

    def _subgroup(self, ranks: Sequence[int], key: bytes) -> SingleCommunicator:
        self._require_open()
        return SingleCommunicator(self.topology)

    def _start(self, request: Request, array: Array, out: Array) -> Work:
        self._require_open()
        if array is not out:
            out.reshape(-1)[...] = array.reshape(-1)
        return DoneWork()

    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        self._require_open()
        return RaggedWork(DoneWork(), [parts[0].reshape(-1).copy()])
