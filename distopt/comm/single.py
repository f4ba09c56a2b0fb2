"""The communicator of a job of one rank: every collective is over at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CommunicatorClosedError, UsageError, WireMemoryError
from ..launch.join.job import Job
from ..launch.topology import Topology
from .base import Array, Communicator, DoneWork, RaggedWork, ReduceOp, Work, storage_of


class SingleCommunicator(Communicator):
    """Collectives over one rank, so that a script for one process needs no `if`. Arrays may be NumPy's and CuPy's."""

    name = "single"

    def __init__(self, topology: Topology) -> None:
        if topology.world_size != 1:
            raise UsageError(f"the single communicator cannot serve {topology.world_size} ranks; choose shm or mpi")
        self.topology = topology
        self._closed = False

    @classmethod
    def create(cls, job: Job) -> SingleCommunicator:
        """The communicator of a job of one rank."""
        return cls(job.topology)

    def barrier(self) -> None:
        """Return at once."""
        self._require_open()

    def close(self) -> None:
        """Local. Refuse further use; idempotent."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise CommunicatorClosedError("rank 0 has closed this communicator; use it before close()")

    def _moves(self, xp: Any) -> bool:
        return True  # data goes nowhere, so it may be anywhere

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        self._require_open()
        try:
            return xp.empty(count, storage_of(dtype))
        except (MemoryError, ValueError) as error:
            raise WireMemoryError(f"{count} elements of {dtype} do not fit in memory; use a smaller model") from error

    def _subgroup(self, ranks: Sequence[int], secret: bytes) -> SingleCommunicator:
        self._require_open()
        return SingleCommunicator(self.topology)

    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self._copy(array, array)

    def _reduce_scatter(self, array: Array, out: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self._copy(array, out)

    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work:
        return self._copy(array, out)

    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> RaggedWork:
        self._require_open()
        return RaggedWork(DoneWork(), [array.reshape(-1).copy()])

    def _all_to_all_ragged(self, parts: Sequence[Array], dtype: str, label: str) -> RaggedWork:
        return self._all_gather_ragged(parts[0], dtype, label)

    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work:
        return self._copy(array, array)

    def _copy(self, source: Array, to: Array) -> Work:
        self._require_open()
        if source is not to:
            to.reshape(-1)[...] = source.reshape(-1)
        return DoneWork()
