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
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ... import _core
from ...errors import UsageError, WireMemoryError
from ...launch.mpi import MpiJob, close_at_exit, import_mpi
from ..base import DTYPES, OPS, Array, Communicator, ReduceOp, Work
from .queue import MpiQueue
from .work import Exchange, Inline, MpiGroup, MpiWorks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...launch.job import Job

__all__ = ["MpiCommunicator"]

_SMALL_BYTES = 8192  # per rank; below it one gather beats two dependent steps
_MAX_COUNT = 2**31 - 1  # counts and displacements of MPI-3 are C ints
_ALIGNMENT = 64


class MpiCommunicator(Communicator):
    """Collectives over an MPI communicator of its own. Progress happens in `done`, `wait` and `progress` only."""

    name: ClassVar[str] = "mpi"
    sends_parts: ClassVar[bool] = True
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

    def empty(self, count: int, dtype: str = "float32") -> Array:
        """Local. An uninitialised flat array, aligned to 64 bytes; MPI needs no special memory."""
        if dtype not in DTYPES:
            raise UsageError(f"there is no wire type {dtype!r}; choose one of {', '.join(DTYPES)}")
        if count < 0:
            raise UsageError(f"an array cannot have {count} elements; pass a count of 0 or more")
        kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        try:
            memory = np.empty(count * kind.itemsize + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise WireMemoryError(f"{self._queue.me}: {count} elements of {dtype} do not fit into memory") from error
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + count * kind.itemsize].view(kind)

    # -- collectives -------------------------------------------------------------------------------------------------
    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        works = []
        for part in self._parts(array):
            inline = steps = None
            if part.nbytes <= self._inline_bytes:
                inline = Inline(part, partial(self._reduce_inline, part, dtype, op))
            elif part.nbytes <= _SMALL_BYTES:
                steps = self._gather_and_reduce(part, dtype, op)
            else:
                steps = self._reduce_in_slices(self._everyone, part, dtype, op)
            works.append(
                self._queue.begin("all_reduce", [part], steps, dtype, label, count=part.size, op=op, inline=inline)
            )
        return self._together(works)

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
        bounds = [array.size * r // group.size for r in range(group.size + 1)]
        counts = [end - start for start, end in pairwise(bounds)]
        mine = array[bounds[group.rank] : bounds[group.rank + 1]]
        yield from self._exchange_and_reduce(group, array, (counts, bounds[:-1]), mine, dtype, op)
        if divisor != 1:
            mine /= divisor
        kind = self._types[array.itemsize]
        yield group.second.Iallgatherv(self._mpi.IN_PLACE, [array, counts, bounds[:-1], kind])

    def _exchange_and_reduce(
        self, group: MpiGroup, array: Array, layout: tuple[list[int], list[int]], out: Array, dtype: str, op: ReduceOp
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
        works = []
        for start, stop in self._chunks(flat.size):
            steps = self._scatter_steps(rows[:, start:stop], flat[start:stop], dtype, op)
            works.append(
                self._queue.begin("reduce_scatter", [rows, flat], steps, dtype, label, count=stop - start, op=op)
            )
        return self._together(works)

    def _scatter_steps(self, rows: Array, out: Array, dtype: str, op: ReduceOp) -> Iterator[Any]:
        # Columns of a huge array are copied together: displacements of the whole would not fit into MPI's ints.
        flat = np.ascontiguousarray(rows).reshape(-1)
        layout = ([out.size] * len(rows), [r * out.size for r in range(len(rows))])
        yield from self._exchange_and_reduce(self._everyone, flat, layout, out, dtype, op)

    def _all_gather(self, array: Array, out: Array, dtype: str, label: str) -> Work:
        counts = [array.size] * self.topology.world_size
        if array.nbytes > self._inline_bytes:
            return self._gather(array.reshape(-1), out.reshape(-1), counts, dtype, label)

        def finish(arrived: Exchange) -> None:
            np.concatenate(arrived.payloads(array.dtype, counts), out=out.reshape(-1))

        return self._queue.begin(
            "all_gather", [array, out], None, dtype, label, count=array.size, inline=Inline(array, finish)
        )

    def _all_gather_ragged(self, array: Array, dtype: str, label: str) -> list[Array]:
        counts: list[int] = []
        parts: list[Array] = []

        def finish(arrived: Exchange) -> None:
            counts.extend(arrived.counts())
            if max(counts) * array.itemsize <= self._inline_bytes:
                parts.extend(payload.copy() for payload in arrived.payloads(array.dtype, counts))

        inline = Inline(array if array.nbytes <= self._inline_bytes else array[:0], finish)
        self._queue.begin("all_gather_ragged", [array], None, dtype, label, count=array.size, inline=inline).wait()
        if parts:
            return parts
        whole = np.empty(sum(counts), array.dtype)
        self._gather(array.reshape(-1), whole, counts, dtype, label).wait()
        return np.split(whole, np.cumsum(counts)[:-1])

    def _gather(self, mine: Array, out: Array, counts: list[int], dtype: str, label: str) -> Work:
        """`out` = the arrays of all ranks in rank order; counts may differ, but all ranks know them."""
        outs = np.split(out, np.cumsum(counts)[:-1])
        works = []
        for start, stop in [(0, max(counts))] if out.size <= self.max_count else self._chunks(max(counts)):
            parts = [part[start:stop] for part in outs]
            whole = out if out.size <= self.max_count else None
            steps = self._gather_steps(mine[start:stop], parts, whole)
            works.append(
                self._queue.begin(
                    "all_gather", [mine, *parts], steps, dtype, label, count=sum(part.size for part in parts)
                )
            )
        return self._together(works)

    def _gather_steps(self, mine: Array, parts: list[Array], whole: Array | None) -> Iterator[Any]:
        """Gather into `parts`; directly, if they lie side by side in `whole`."""
        kind = self._types[mine.itemsize]
        counts = [part.size for part in parts]
        scratch = None if whole is not None else self._take(sum(counts) * mine.itemsize)
        if whole is not None and np.may_share_memory(mine, whole):
            mine = mine.copy()
        received: Array = whole if scratch is None else scratch.view(mine.dtype)
        yield self._everyone.first.Iallgatherv([mine, kind], [received, counts, _starts(counts), kind])
        if scratch is not None:
            for part, start in zip(parts, _starts(counts), strict=True):
                part[...] = received[start : start + part.size]
            self._give(scratch)

    def _all_to_all_ragged(self, parts: Sequence[Array], dtype: str, label: str) -> list[Array]:
        lengths = np.array([part.size for part in parts], np.int64)
        table = np.stack(self._all_gather_ragged(lengths, "int64", label))  # row: from, column: to
        longest = int(table.max())
        received = [np.empty(count, parts[0].dtype) for count in table[:, self.topology.rank]]
        works = []
        for start, stop in self._chunks(longest):
            steps = self._all_to_all_steps([p[start:stop] for p in parts], [r[start:stop] for r in received])
            arrays = [*parts, *received]
            works.append(self._queue.begin("all_to_all_ragged", arrays, steps, dtype, label, count=longest))
        self._together(works).wait()
        return received

    def _all_to_all_steps(self, parts: list[Array], received: list[Array]) -> Iterator[Any]:
        kind = self._types[parts[0].itemsize]
        send, receive = ([part.size for part in side] for side in (parts, received))
        into = np.empty(sum(receive), parts[0].dtype)
        yield self._everyone.first.Ialltoallv(
            [np.concatenate(parts), send, _starts(send), kind], [into, receive, _starts(receive), kind]
        )
        for part, start in zip(received, _starts(receive), strict=True):
            part[...] = into[start : start + part.size]

    def _broadcast(self, array: Array, root: int, dtype: str, label: str) -> Work:
        works = []
        for part in self._parts(array):
            inline = steps = None
            if part.nbytes <= self._inline_bytes:
                inline = self._inline_broadcast(part, root)
            else:
                steps = self._broadcast_steps(part, root)
            works.append(
                self._queue.begin("broadcast", [part], steps, dtype, label, count=part.size, root=root, inline=inline)
            )
        return self._together(works)

    def _inline_broadcast(self, array: Array, root: int) -> Inline:
        is_root = self.topology.rank == root

        def finish(arrived: Exchange) -> None:
            if not is_root:
                array[...] = arrived.payloads(array.dtype, [array.size] * self.topology.world_size)[root]

        return Inline(array if is_root else array[:0], finish)

    def _broadcast_steps(self, array: Array, root: int) -> Iterator[Any]:
        yield self._everyone.first.Ibcast([array, self._types[array.itemsize]], root)

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations of this rank have finished."""
        self._queue.begin("barrier", [], None)
        for work in list(self._queue.outstanding):  # its own is the last
            work.wait()

    def progress(self) -> None:
        """Local. Move outstanding operations forward without waiting."""
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

    def _together(self, works: Sequence[Work]) -> Work:
        return works[0] if len(works) == 1 else MpiWorks(works)

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


def _starts(counts: Sequence[int]) -> list[int]:
    """Where parts of these lengths begin that lie side by side."""
    return [0, *accumulate(counts[:-1])]
