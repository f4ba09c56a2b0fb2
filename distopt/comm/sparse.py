"""Sums of sparse lists over ranks, for transports that have no way of their own.

A list is what one rank contributes to a dense array: ascending int32 indices, each with a float32 value. Two ways lead
to the sum, and the exchanged counts choose between them and the dense reduction, alike on every rank:

* *gather*: every rank receives every list;
* *split*: every rank receives what falls into its own range of indices, adds it up and sends the result to all, as in
  Ok-Topk (Li and Hoefler, arXiv 2201.07598, section 3.1), but without dropping anything.

Both add in rank order, so all ranks hold the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from ..kernels import kernels_of
from .base import SparseWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Array, Communicator, SparseLists, Work

__all__ = ["ENTRY_BYTES", "SparseStrategy", "choose_strategy", "dense_wire_bytes", "start_sparse"]

SparseStrategy: TypeAlias = Literal["gather", "split", "dense"]

ENTRY_BYTES = 8  # an int32 index and a float32 value


def dense_wire_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a bandwidth-optimal dense all_reduce of `nbytes`: a ring's 2 (n - 1) / n."""
    return 2 * nbytes * (world_size - 1) // world_size


def choose_strategy(counts: Sequence[int], size: int, *, splits: bool) -> SparseStrategy:
    """The cheapest way, in bytes received per rank, to add lists of `counts` entries into a dense array of `size`.

    Args:
        counts: number of entries of every rank's list.
        size: length of the dense float32 array.
        splits: whether the transport can send each rank only its part.
    """
    total = sum(counts)
    costs: dict[SparseStrategy, int] = {"dense": 8 * size, "gather": ENTRY_BYTES * total}
    if splits:
        # How far the lists overlap is unknown before the exchange: the reduced ranges are counted without overlap.
        costs["split"] = ENTRY_BYTES * max(counts) + min(ENTRY_BYTES * total, 4 * size)
    return min(costs, key=lambda strategy: costs[strategy])


def start_sparse(comm: Communicator, lists: SparseLists) -> SparseWork:
    """Collective. The default of `Communicator.sparse_all_reduce`."""
    if choose_strategy(lists.counts, lists.dense.size, splits=comm.sends_parts) == "split":
        return _split(comm, lists)
    return _Gather(comm, lists)


class _Gather(SparseWork):
    """All lists on their way to all ranks; `wait` adds them up."""

    def __init__(self, comm: Communicator, lists: SparseLists) -> None:
        world_size, label = comm.topology.world_size, lists.label
        own = (lists.indices, lists.values)
        self.wire_bytes = ENTRY_BYTES * lists.values.size * (world_size - 1)
        self._lists = lists
        self._kernels = kernels_of(lists.dense)
        self._finished = False
        self._works: list[Work] = []
        self._gathered: list[list[Array]]
        if len(set(lists.counts)) == 1:
            outs = [self._kernels.empty(array.size * world_size, array.dtype) for array in own]
            self._works = [comm.all_gather(array, out, label=label) for array, out in zip(own, outs, strict=True)]
            each = lists.values.size
            self._gathered = [[out[r * each : (r + 1) * each] for r in range(world_size)] for out in outs]
        else:
            self._gathered = [comm.all_gather_ragged(array, label=label) for array in own]

    def done(self) -> bool:
        states = [work.done() for work in self._works]  # a list, so that every one moves forward
        return all(states)

    def wait(self, timeout: float | None = None) -> None:
        if self._finished:
            return
        for work in self._works:
            work.wait(timeout)
        dense = self._lists.dense
        indices, values = self._gathered
        self._kernels.scatter_sum(dense, indices, values, 0, dense.size, self._lists.scale)
        self._finished = True


class _Split(SparseWork):
    """A split reduction, finished when it was started."""

    def __init__(self, wire_bytes: int) -> None:
        self.wire_bytes = wire_bytes

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        pass


def _split(comm: Communicator, lists: SparseLists) -> SparseWork:
    rank, world_size = comm.topology.rank, comm.topology.world_size
    dense, label = lists.dense, lists.label
    kernels = kernels_of(dense)
    bounds = [dense.size * r // world_size for r in range(world_size + 1)]
    cuts = kernels.cuts(lists.indices, bounds)
    lo, hi = bounds[rank], bounds[rank + 1]
    sent = ENTRY_BYTES * (lists.indices.size - (cuts[rank + 1] - cuts[rank]))

    parts = [slice(cuts[r], cuts[r + 1]) for r in range(world_size)]
    index_parts = comm.all_to_all_ragged([lists.indices[part] for part in parts], label=label)
    value_parts = comm.all_to_all_ragged([lists.values[part] for part in parts], label=label)
    kernels.scatter_sum(dense, index_parts, value_parts, lo, hi, lists.scale)
    own = dense[lo:hi]

    if ENTRY_BYTES * sum(lists.counts) >= dense.nbytes:
        for r, reduced in enumerate(comm.all_gather_ragged(own, label=label)):
            dense[bounds[r] : bounds[r + 1]] = reduced
        return _Split(sent + own.nbytes * (world_size - 1))
    # A sum that starts at +0 is never -0, so an entry that is left out as zero has the same bits on the other ranks.
    kept, values = kernels.nonzero(own)
    kept += kept.dtype.type(lo)
    all_indices = comm.all_gather_ragged(kept, label=label)
    all_values = comm.all_gather_ragged(values, label=label)
    kernels.scatter_sum(dense, all_indices, all_values, 0, dense.size)
    return _Split(sent + ENTRY_BYTES * kept.size * (world_size - 1))
