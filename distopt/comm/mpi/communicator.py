"""Collectives over MPI, for ranks on several hosts.

Every operation begins with an exchange of fingerprints, so that ranks which call different collectives raise instead of
corrupting data or waiting for ever. Tiny data travel with it. A small array is gathered whole and reduced by everyone;
a large one is cut into one slice per rank, every rank reduces its slice and the results are gathered (Rabenseifner,
"Optimization of Collective Reduction Operations", ICCS 2004). MPI moves bytes only: the sums are ours, in rank order,
because the order of MPI_Allreduce is the library's own choice.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from ... import _core
from ...errors import UsageError, WireMemoryError
from ...launch.mpi import MpiJob, close_at_exit, import_mpi
from ..base import DTYPES, OPS, Array, Communicator, RaggedWork, ReduceOp, Work, storage_of
from .queue import MpiQueue
from .steps import Chain, Exchange, Inline, MpiGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...launch.job import Job

__all__ = ["MpiCommunicator"]

_SMALL_BYTES = 8192  # per rank; below it one gather beats two dependent steps
_MAX_COUNT = 2**31 - 1  # counts and displacements of MPI-3 are C ints
_ALIGNMENT = 64

Layout: TypeAlias = tuple[list[int], list[int]]  # how many elements each rank has, and where they begin


class MpiCommunicator(Communicator):
    """Collectives over an MPI communicator of its own. Progress happens in `done`, `wait` and `progress` only."""

    name: ClassVar[str] = "mpi"
    sends_parts: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    max_count: ClassVar[int] = _MAX_COUNT

    @classmethod
    def create(cls, job: Job) -> MpiCommunicator:
        """Collective. Build the communicator of `job`, which must be one of mpiexec."""
        if not isinstance(job, MpiJob):
            raise UsageError(f"backend {cls.name!r} cannot serve a {type(job).__name__}; start the script with mpiexec")
        return cls(job)

    def __init__(self, job: MpiJob) -> None:
        """Collective."""
        self.topology = job.topology
        self._mpi = import_mpi()
        self._types = {2: self._mpi.UINT16_T, 4: self._mpi.UINT32_T, 8: self._mpi.UINT64_T}
        self._queue = MpiQueue(self._mpi, job)
        self._inline_bytes = self._queue.inline_bytes
        self._everyone = MpiGroup(job.comm.rank, job.comm.size, job.comm.Dup(), job.comm.Dup())
        self._scratch: list[Array] = []
        close_at_exit(self)

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        # Aligned to cache lines; MPI needs no special memory.
        n_bytes = count * storage_of(dtype).itemsize
        try:
            memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise WireMemoryError(f"{self._queue.me}: {count} elements of {dtype} do not fit into memory") from error
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + n_bytes].view(storage_of(dtype))

    # -- collectives -------------------------------------------------------------------------------------------------
    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        flat, inline, steps = array.reshape(-1), None, None
        if flat.nbytes <= self._inline_bytes:
            inline = Inline(flat, partial(self._reduce_inline, flat, dtype, op))
        elif flat.nbytes <= _SMALL_BYTES:
            steps = self._gather_and_reduce(flat, dtype, op)
        else:
            steps = self._reduce_in_slices(self._everyone, flat, dtype, op)
        return self._queue.begin("all_reduce", [flat], steps, dtype, label, count=flat.size, op=op, inline=inline)

    def _reduce_inline(self, array: Array, dtype: str, op: ReduceOp, arrived: Exchange) -> None:
        payloads = arrived.payloads(array.dtype, [array.size] * self.topology.world_size)
        _core.reduce([array], payloads, DTYPES[dtype], OPS[op])

    def _gather_and_reduce(self, array: Array, dtype: str, op: ReduceOp) -> Iterator[Any]:
        size, kind = self.topology.world_size, self._types[array.itemsize]
        scratch = self._take(array.nbytes * size)
        inputs = scratch.view(array.dtype).reshape(size, array.size)
        yield self._everyone.first.Iallgather([array, kind], [inputs, kind])
        _core.reduce([array], list(inputs), DTYPES[dtype], OPS[op])
        self._give(scratch)

    def _reduce_in_slices(
        self, group: MpiGroup, array: Array, dtype: str, op: ReduceOp, divisor: int = 1
    ) -> Iterator[Any]:
        """Two steps: `array` = its reduction over `group`, divided by `divisor`."""
        kind = self._types[array.itemsize]
        parts = self._parts(array)
        layouts = [_slices(part.size, group.size) for part in parts]

        def scatter(part: Array, layout: Layout) -> Iterator[Any]:
            counts, starts = layout
            mine = part[starts[group.rank] : starts[group.rank] + counts[group.rank]]
            yield from self._exchange_and_reduce(group, part, layout, mine, dtype, op)
            if divisor != 1:
                mine /= divisor

        def collect(part: Array, layout: Layout) -> Iterator[Any]:
            yield group.second.Iallgatherv(self._mpi.IN_PLACE, [part, *layout, kind])

        yield from _one_step(map(scatter, parts, layouts))
        yield from _one_step(map(collect, parts, layouts))

    def _exchange_and_reduce(
        self, group: MpiGroup, array: Array, layout: Layout, out: Array, dtype: str, op: ReduceOp
    ) -> Iterator[Any]:
        """`out` = the reduction of this rank's slice of `array`, cut as `layout` (counts, starts) says."""
        rank, size = group.rank, group.size
        kind = self._types[array.itemsize]
        send, starts = list(layout[0]), layout[1]
        own = array[starts[rank] : starts[rank] + send[rank]]
        receive = [own.size] * size
        send[rank] = receive[rank] = 0  # the own slice is where it is needed
        scratch = self._take(own.nbytes * size)
        inputs = scratch.view(array.dtype).reshape(size, own.size)
        into = [r * own.size for r in range(size)]
        yield group.first.Ialltoallv([array, send, starts, kind], [inputs, receive, into, kind])
        parts = [own if r == rank else inputs[r] for r in range(size)]
        _core.reduce([out], parts, DTYPES[dtype], OPS[op])
        self._give(scratch)

    def _reduce_scatter(self, array: Array, out: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        rows, flat = array.reshape(self.topology.world_size, -1), out.reshape(-1)
        steps = _one_step(
            self._scatter_steps(rows[:, start:stop], flat[start:stop], dtype, op)
            for start, stop in self._chunks(flat.size)
        )
        return self._queue.begin("reduce_scatter", [rows, flat], steps, dtype, label, count=flat.size, op=op)

    def _scatter_steps(self, rows: Array, out: Array, dtype: str, op: ReduceOp) -> Iterator[Any]:
        # Columns of a huge array are copied together: displacements of the whole would not fit into MPI's ints.
        flat = np.ascontiguousarray(rows).reshape(-1)
        layout = ([out.size] * len(rows), [r * out.size for r in range(len(rows))])
        yield from self._exchange_and_reduce(self._everyone, flat, layout, out, dtype, op)

    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work:
        mine, whole = array.reshape(-1), out.reshape(-1)
        counts = [mine.size] * self.topology.world_size
        inline = steps = None
        if mine.nbytes <= self._inline_bytes:
            inline = Inline(mine, lambda arrived: np.concatenate(arrived.payloads(mine.dtype, counts), out=whole))
        else:
            steps = self._gather_steps(mine, whole, counts)
        return self._queue.begin("all_gather", [mine, whole], steps, dtype, label, count=mine.size, inline=inline)

    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> RaggedWork:
        mine = array.reshape(-1)
        counts: list[int] = []
        parts: list[Array] = []

        def finish(arrived: Exchange) -> None:
            counts.extend(arrived.counts())
            if max(counts) * mine.itemsize <= self._inline_bytes:
                parts.extend(payload.copy() for payload in arrived.payloads(mine.dtype, counts))

        def steps() -> Iterator[Any]:
            if not parts:
                whole = np.empty(sum(counts), mine.dtype)
                yield from self._gather_steps(mine, whole, counts)
                parts.extend(_split(whole, counts))

        inline = Inline(mine if mine.nbytes <= self._inline_bytes else mine[:0], finish)
        work = self._queue.begin("all_gather_ragged", [mine], steps(), dtype, label, count=mine.size, inline=inline)
        return RaggedWork(work, parts)

    def _gather_steps(self, mine: Array, whole: Array, counts: list[int]) -> Iterator[Any]:
        """One step: `whole` = the arrays of all ranks in rank order; counts may differ, but all ranks know them."""
        kind = self._types[mine.itemsize]
        if whole.size <= self.max_count:
            if np.may_share_memory(mine, whole):
                mine = mine.copy()
            yield self._everyone.first.Iallgatherv([mine, kind], [whole, counts, _starts(counts), kind])
            return
        outs = _split(whole, counts)
        yield from _one_step(
            self._gather_chunk(mine[start:stop], [out[start:stop] for out in outs])
            for start, stop in self._chunks(max(counts))
        )

    def _gather_chunk(self, mine: Array, parts: list[Array]) -> Iterator[Any]:
        kind = self._types[mine.itemsize]
        counts = [part.size for part in parts]
        scratch = self._take(sum(counts) * mine.itemsize)
        received = scratch.view(mine.dtype)
        yield self._everyone.first.Iallgatherv([mine, kind], [received, counts, _starts(counts), kind])
        for part, arrived in zip(parts, _split(received, counts), strict=True):
            part[...] = arrived
        self._give(scratch)

    def _all_to_all_ragged(self, parts: Sequence[Array], dtype: str, label: str) -> RaggedWork:
        sent = [part.reshape(-1) for part in parts]
        counts = np.array([part.size for part in sent], np.int64)
        longest: list[int] = []
        received: list[Array] = []

        def steps() -> Iterator[Any]:
            incoming = np.empty_like(counts)
            yield self._everyone.first.Ialltoall([counts, self._types[8]], [incoming, self._types[8]])
            received.extend(np.empty(count, sent[0].dtype) for count in incoming)
            yield from _one_step(
                self._all_to_all_chunk([p[start:stop] for p in sent], [r[start:stop] for r in received])
                for start, stop in self._chunks(max(longest))
            )

        # The longest part of each rank travels as the count, so that all take as many chunks.
        inline = Inline(counts[:0], lambda arrived: longest.extend(arrived.counts()))
        count = int(counts.max())
        work = self._queue.begin("all_to_all_ragged", sent, steps(), dtype, label, count=count, inline=inline)
        return RaggedWork(work, received)

    def _all_to_all_chunk(self, parts: list[Array], received: list[Array]) -> Iterator[Any]:
        kind = self._types[parts[0].itemsize]
        send, receive = ([part.size for part in side] for side in (parts, received))
        into = np.empty(sum(receive), parts[0].dtype)
        yield self._everyone.second.Ialltoallv(
            [np.concatenate(parts), send, _starts(send), kind], [into, receive, _starts(receive), kind]
        )
        for part, arrived in zip(received, _split(into, receive), strict=True):
            part[...] = arrived

    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work:
        flat, inline, steps = array.reshape(-1), None, None
        if flat.nbytes <= self._inline_bytes:
            inline = self._inline_broadcast(flat, root)
        else:
            steps = _one_step(self._broadcast_part(part, root) for part in self._parts(flat))
        return self._queue.begin("broadcast", [flat], steps, dtype, label, count=flat.size, root=root, inline=inline)

    def _inline_broadcast(self, array: Array, root: int) -> Inline:
        is_root = self.topology.rank == root

        def finish(arrived: Exchange) -> None:
            if not is_root:
                array[...] = arrived.payloads(array.dtype, [array.size] * self.topology.world_size)[root]

        return Inline(array if is_root else array[:0], finish)

    def _broadcast_part(self, array: Array, root: int) -> Iterator[Any]:
        yield self._everyone.first.Ibcast([array, self._types[array.itemsize]], root)

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations of this rank have finished."""
        self._queue.begin("barrier", [], None)
        for work in list(self._queue.outstanding):  # its own is the last
            work.wait()

    def progress(self) -> None:  # noqa: D102
        self._queue.progress()

    def close(self) -> None:
        """Local. Leave; ranks that wait for an operation which this one has not finished get an error. Idempotent."""
        if self._queue.close():
            self._everyone.free()

    @property
    def closed(self) -> bool:
        """Local. Whether this rank has left."""
        return self._queue.closed

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _parts(self, array: Array) -> list[Array]:
        flat = array.reshape(-1)
        step = self.max_count
        return [flat[start : start + step] for start in range(0, flat.size, step)] or [flat]

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        """Ranges of a part of which all ranks together have at most `max_count` elements."""
        step = max(1, self.max_count // self.topology.world_size)
        return [(start, min(start + step, count)) for start in range(0, count, step)] or [(0, 0)]

    def _take(self, n_bytes: int) -> Array:
        """Scratch memory, of an operation that has finished where there is enough."""
        if not self._scratch:
            return np.empty(n_bytes, np.uint8)
        largest = self._scratch.pop()
        memory = largest if largest.nbytes >= n_bytes else np.empty(n_bytes, np.uint8)
        return memory[:n_bytes]

    def _give(self, scratch: Array) -> None:
        self._scratch.append(scratch if scratch.base is None else scratch.base)
        self._scratch.sort(key=len)


def _one_step(parts: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """The requests of `parts`, which give out one each, as one step."""
    several = list(parts)
    if len(several) == 1:
        yield from several[0]
    else:
        yield Chain(several)


def _slices(count: int, size: int) -> Layout:
    """One slice of `count` elements for each of `size` ranks, about equal."""
    bounds = [count * r // size for r in range(size + 1)]
    return [end - start for start, end in pairwise(bounds)], bounds[:-1]


def _starts(counts: Sequence[int]) -> list[int]:
    """Where parts of these lengths begin that lie side by side."""
    return [0, *accumulate(counts[:-1])]


def _split(whole: Array, counts: Sequence[int]) -> list[Array]:
    return [whole[start : start + count] for start, count in zip(_starts(counts), counts, strict=True)]
