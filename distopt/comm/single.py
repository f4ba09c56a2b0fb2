"""The communicator of a job of one rank: every collective is over at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CommunicatorClosedError, UsageError, WireMemoryError
from .base import DTYPES, Array, Communicator, DoneWork, ReduceOp, Work

if TYPE_CHECKING:
    from ..launch.job import Job
    from ..launch.topology import Topology

__all__ = ["SingleCommunicator"]


class SingleCommunicator(Communicator):
    """Collectives over one rank, so that a script for one process needs no `if`.

    Attributes:
        xp: module of the arrays that `empty` makes, numpy unless set. Arrays of any module are taken.
    """

    name = "single"

    def __init__(self, topology: Topology) -> None:
        if topology.world_size != 1:
            raise UsageError(f"the single communicator cannot serve {topology.world_size} ranks; choose shm or mpi")
        self.topology = topology
        self.xp: Any = np
        self._closed = False

    @classmethod
    def create(cls, job: Job) -> SingleCommunicator:
        """The communicator of a job of one rank."""
        return cls(job.topology)

    def empty(self, count: int, dtype: str = "float32") -> Array:
        """Local here. An uninitialised flat array."""
        self._require_open()
        if dtype not in DTYPES or count < 0:
            raise UsageError(f"cannot make an array of {count} {dtype}; choose one of {', '.join(DTYPES)}")
        try:
            return self.xp.empty(count, "uint16" if dtype == "bfloat16" else dtype)
        except (MemoryError, ValueError) as error:
            raise WireMemoryError(f"{count} elements of {dtype} do not fit in memory; use a smaller model") from error

    def barrier(self) -> None:
        """Return at once."""
        self._require_open()

    def close(self) -> None:
        """Local. Refuse further use; idempotent."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise CommunicatorClosedError("rank 0 has closed this communicator; use it before close()")

    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self._copy(array, array)

    def _reduce_scatter(self, array: Array, out: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        return self._copy(array, out)

    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work:
        return self._copy(array, out)

    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> list[Array]:
        self._require_open()
        return [array.reshape(-1).copy()]

    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work:
        return self._copy(array, array)

    def _copy(self, source: Array, to: Array) -> Work:
        self._require_open()
        if source is not to:
            to.reshape(-1)[...] = source.reshape(-1)
        return DoneWork()
