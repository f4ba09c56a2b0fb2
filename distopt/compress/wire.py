"""The communicator as a codec sees it: the same collectives, with bytes and time counted."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..comm.sparse import dense_wire_bytes, sparse_all_reduce

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ..comm import Communicator, Work
    from ..comm.base import Array, ReduceOp
    from .statistics import Statistics

__all__ = ["Wire"]


class Wire:
    """The collectives of one bucket.

    Attributes:
        cost: what bytes and times are added to.
        rank: this rank.
        world_size: number of ranks.
        hosts: host name of every rank.
        finds_nonfinite: whether `all_reduce` looks for NaN and infinity while it adds.
        sends_parts: see `Communicator`.
        empty: gives wire memory, as `Communicator.empty` does; collective.
        label: of the collectives that follow, alike on all ranks; communicators compare it.
    """

    def __init__(
        self, comm: Communicator, label: str, cost: Statistics, empty: Callable[..., Array] | None = None
    ) -> None:
        topology = comm.topology
        self.cost = cost
        self.rank, self.world_size, self.hosts = topology.rank, topology.world_size, topology.hosts
        self.finds_nonfinite = comm.finds_nonfinite
        self.sends_parts = comm.sends_parts
        self.empty = empty or comm.empty
        self.label = label
        self._comm = comm

    def all_reduce(self, array: Array, op: ReduceOp, *, wire: str | None = None, find_nonfinite: bool = False) -> Work:
        """Collective. See `Communicator.all_reduce`."""
        n_bytes = dense_wire_bytes(array.nbytes, self.world_size)
        return self._booked(n_bytes, self._comm.all_reduce, array, op, wire=wire, find_nonfinite=find_nonfinite)

    def all_gather(self, array: Array, out: Array) -> Work:
        """Collective. See `Communicator.all_gather`."""
        return self._booked(array.nbytes * (self.world_size - 1), self._comm.all_gather, array, out)

    def sparse_all_reduce(
        self, indices: Array, values: Array, dense: Array, counts: Sequence[int], scale: float
    ) -> Generator[Work, None, None]:
        """Collective. See `comm.sparse.sparse_all_reduce`."""
        self.cost.wire_bytes += yield from sparse_all_reduce(
            self._comm, indices, values, dense, counts=counts, scale=scale, label=self.label
        )

    def _booked(self, n_bytes: int, start: Callable[..., Work], *args: Any, **options: Any) -> Work:
        began = perf_counter()
        work = start(*args, label=self.label, **options)
        self.cost.wire_bytes += n_bytes
        self.cost.comm_seconds += perf_counter() - began
        return work
