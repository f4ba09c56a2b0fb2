"""Sums of sparse lists over ranks, on any communicator.

A list is the contribution of one rank to a dense array: ascending int32 indices, each with a float32 value. Two routes
lead to the sum, and the counts decide between them and the dense reduction, equally on all ranks:

* *gather*: every rank receives every list;
* *split*: every rank receives the entries in its own range of indices, adds it up and sends the result to all, as in
  Ok-Topk (Li and Hoefler, arXiv 2201.07598, section 3.1), but without dropping anything.

Both add in rank order, so all ranks hold the same bits. Both are generators of the works that they need: the caller
waits for each `Work` that one yields and then resumes it, at points that are the same on all ranks, since what
follows may start a collective.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from ..kernels import kernels_of
from .base import Array, Communicator, Work

Route: TypeAlias = Literal["gather", "split", "dense"]

ENTRY_BYTES = 8  # an int32 index and a float32 value


@lru_cache(maxsize=1024)  # every reduction asks, and mostly for the same sizes
def dense_wire_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a bandwidth-optimal dense all_reduce of `nbytes`: a ring's 2 (n - 1) / n."""
    return 2 * nbytes * (world_size - 1) // world_size


def choose_route(counts: Sequence[int], size: int, *, splits: bool) -> Route:
    """The cheapest way, in bytes received per rank, to add lists of `counts` entries into a dense array of `size`.

    Args:
        counts: number of entries of every rank's list.
        size: length of the dense float32 array.
        splits: whether the transport can send each rank only its part.
    """
    total = sum(counts)
    costs: dict[Route, int] = {"dense": 8 * size, "gather": ENTRY_BYTES * total}
    if splits:
        # How far the lists overlap is unknown before the exchange: the reduced ranges are counted without overlap.
        costs["split"] = ENTRY_BYTES * max(counts) + min(ENTRY_BYTES * total, 4 * size)
    return min(costs, key=lambda route: costs[route])


def sparse_all_reduce(
    comm: Communicator,
    indices: Array,
    values: Array,
    dense: Array,
    counts: Sequence[int],
    *,
    scale: float = 1.0,
    label: str = "",
) -> Generator[Work, None, int]:
    """Collective. Overwrite `dense` by the sum over ranks, in rank order, of `scale * values` put at `indices`.

    It returns the bytes that this rank sent. The lists must not change before it has ended.

    Args:
        comm: moves the lists.
        indices: int32, strictly ascending, inside `dense`; the length may differ between ranks.
        values: float32, as long as `indices`.
        dense: flat float32; zero where no rank has an entry.
        counts: length of every rank's list.
        scale: factor on every value.
        label: shown in diagnostics.
    """
    route = choose_route(counts, dense.size, splits=comm.sends_parts)
    return (yield from (_split if route == "split" else _gather)(comm, indices, values, dense, counts, scale, label))


def _gather(
    comm: Communicator, indices: Array, values: Array, dense: Array, counts: Sequence[int], scale: float, label: str
) -> Generator[Work, None, int]:
    kernels, world_size, own = kernels_of(dense), comm.topology.world_size, (indices, values)
    if len(set(counts)) == 1:
        outs = [kernels.empty(array.size * world_size, array.dtype) for array in own]
        with comm.together():
            gathers = [comm.all_gather(array, out, label=label) for array, out in zip(own, outs, strict=True)]
        yield from gathers
        each = values.size
        all_indices, all_values = ([out[r * each : (r + 1) * each] for r in range(world_size)] for out in outs)
    else:
        with comm.together():
            works = [comm.all_gather_ragged(array, label=label, counts=counts) for array in own]
        yield from works
        all_indices, all_values = (work.parts for work in works)
    kernels.scatter_sum(dense, all_indices, all_values, 0, dense.size, scale)
    return ENTRY_BYTES * int(values.size) * (world_size - 1)


def _split(
    comm: Communicator, indices: Array, values: Array, dense: Array, counts: Sequence[int], scale: float, label: str
) -> Generator[Work, None, int]:
    rank, world_size = comm.topology.rank, comm.topology.world_size
    kernels = kernels_of(dense)
    bounds = [dense.size * r // world_size for r in range(world_size + 1)]
    cuts = kernels.cuts(indices, bounds)
    lo, hi = bounds[rank], bounds[rank + 1]
    sent_bytes = ENTRY_BYTES * (int(indices.size) - (cuts[rank + 1] - cuts[rank]))

    ranges = [slice(cuts[r], cuts[r + 1]) for r in range(world_size)]
    exchanges = [comm.all_to_all_ragged([array[part] for part in ranges], label=label) for array in (indices, values)]
    yield from exchanges
    kernels.scatter_sum(dense, exchanges[0].parts, exchanges[1].parts, lo, hi, scale)
    own = dense[lo:hi]

    if ENTRY_BYTES * sum(counts) >= dense.nbytes:
        gathered = comm.all_gather_ragged(own, label=label)
        yield gathered
        for r, reduced in enumerate(gathered.parts):
            dense[bounds[r] : bounds[r + 1]] = reduced
        return sent_bytes + int(own.nbytes) * (world_size - 1)
    # A sum that starts at +0 is never -0, so an entry that is left out as zero has the same bits on the other ranks.
    kept, sums = kernels.nonzero(own)
    kept += kept.dtype.type(lo)
    works = [comm.all_gather_ragged(array, label=label) for array in (kept, sums)]
    yield from works
    kernels.scatter_sum(dense, works[0].parts, works[1].parts, 0, dense.size)
    return sent_bytes + ENTRY_BYTES * int(kept.size) * (world_size - 1)
