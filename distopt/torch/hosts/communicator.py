"""Collectives over several hosts: shared memory inside a host, PyTorch's Gloo between hosts.

An all_reduce has three stages. The ranks of a host reduce in shared memory, one slice each. The ranks that carry the
same slice on all hosts exchange it through Gloo and add it up. Then each rank reads the slices of its host. The network
thus carries as many bytes as if one rank per host sent them, and all ranks of a host send together. Large arrays are
sent in chunks: some are on the network while the next is reduced inside the host.

Sums run in rank order inside a host, then over the hosts in the order of their first ranks: the same bits on all ranks
and in every run. 16-bit floats are accumulated in float32, and rounded once per host and once at the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from ...comm.base import Array, Communicator, MessageWork, RaggedWork, Request, Work
from ...errors import CommunicatorClosedError, CommunicatorError, PeerLostError, UsageError
from ..tensors import array_of, bytes_of
from .description import Description
from .exchange import NOTHING, Between, Exchange, Heads, fold

if TYPE_CHECKING:
    from ...launch.job.topology import Topology
    from .gloo import Gloo

_T = TypeVar("_T")

# Bytes of a slice in a chunk: large enough to hide the time of a message, small enough that one chunk is on the network
# while the next is inside the host.
_SMALLEST_CHUNK_BYTES, _LARGEST_CHUNK_BYTES = 2 << 20, 4 << 20
_CHUNKS = 4  # of a slice, unless they would be smaller or larger than that
_CHUNKS_REDUCED, _CHUNKS_GATHERED = 5, 1  # most chunks on the network in either phase of `Exchange`


class HostsCommunicator(Communicator):
    """Collectives over hosts with any numbers of ranks, and with any assignment of ranks to hosts.

    Operations are carried out in the order in which they were started: `Work.wait` carries out one, and before it all
    earlier ones that no `wait` has reached. Messages take tags from 0 to 2^20 - 1, and only `wait` notices their end.

    Attributes:
        begins_at_once: sums start when they are called, and progress while this rank computes.
    """

    name: ClassVar[str] = "gloo"
    sends_parts: ClassVar[bool] = True
    moves_messages: ClassVar[bool] = True

    def __init__(
        self,
        topology: Topology,
        hosts: Sequence[Sequence[int]],
        local: Communicator,
        gloo: Gloo,
        seconds: float,
    ) -> None:
        """Local.

        Args:
            topology: of all ranks.
            hosts: the ranks of each host, in the order of their local ranks.
            local: the communicator of the ranks of this host.
            gloo: connects all ranks.
            seconds: how long an operation waits for a rank, unless `wait` is called with a timeout.
        """
        self.topology = topology
        self._rank, self._size = topology.rank, topology.world_size
        self._hosts = hosts
        self._mine = next(ranks for ranks in hosts if self._rank in ranks)
        self._local = local
        self._gloo = gloo
        self._seconds = seconds
        self.reduces_in_place = all(len(ranks) > 1 for ranks in hosts)
        self._even = len({len(ranks) for ranks in hosts}) == 1
        self.by_host_above_bytes = None if len(self._mine) == 1 and self._even else 0
        self.begins_at_once = len(hosts) == len(topology.hosts) == 2
        # Number of ranks of every host that carry a slice. The carriers of this rank's slice are empty if it has none.
        self._n_slices = min(len(ranks) for ranks in hosts)
        self._between = Between(gloo, len(hosts), self._n_slices)
        place = topology.local_rank
        self._carriers = [ranks[place] for ranks in hosts] if place < self._n_slices else []
        self._others = [rank for rank in self._carriers if rank != self._rank]
        self._runs: dict[str, Callable[..., None]] = {
            "all_reduce": HostsCommunicator._reduce,
            "reduce_scatter": HostsCommunicator._scatter if self._even else HostsCommunicator._scatter_unevenly,
            "all_gather": HostsCommunicator._gather if self._even else HostsCommunicator._gather_unevenly,
            "broadcast": HostsCommunicator._spread,
        }
        self._number = 0
        self._under_way: deque[_Deferred] = deque()
        self._error: CommunicatorError | None = None

    @classmethod
    def create(cls, job: Any) -> HostsCommunicator:  # noqa: ARG003
        """Raise a UsageError: `distopt.torch.join` makes this communicator."""
        raise UsageError("the gloo communicator serves process groups of PyTorch; choose mpi")

    def barrier(self) -> None:
        """Collective. See `Communicator.barrier`."""
        self.all_reduce(np.zeros(1, np.int32), label="barrier").wait()

    def close(self) -> None:
        """Local. Leave; idempotent. Ranks that wait for this one raise an error."""
        if self._error is None:
            me = self._gloo.me.name
            self._error = CommunicatorClosedError(f"{me} has closed this communicator", cure="use it before close()")
        self._between.close()
        self._gloo.close()
        self._local.close()

    def carry_out(self, call: Description, run: Callable[[Description], _T], timeout: float | None) -> _T:
        """Collective. Run an operation, or a part of it, in its turn; see `Work.wait`."""
        if self._error is not None:
            raise self._error
        if not call.number:
            self._number += 1
            call.number = self._number
        call.deadline = time.monotonic() + (self._seconds if timeout is None else timeout)
        try:
            return run(call)
        except CommunicatorError as error:
            # Inside a host, the kernel reports the end of a process, so the rank in the error is the cause.
            here = [self._gloo.processes[rank] for rank in self._mine]
            is_known = isinstance(error, PeerLostError) and error.ranks[0] in here
            self._error = self._gloo.fail(error, is_known=is_known)
            self._between.close()
            self._local.close()
            raise self._error from error

    def carry_out_oldest(self, timeout: float | None) -> None:
        """Collective. Carry out the oldest operation that no `wait` has reached."""
        number = self._under_way[0].carry_out(timeout)
        self._under_way.popleft()
        if self.flight is not None:
            self.flight.note_end(number)

    # -- for the base class ------------------------------------------------------------------------------------------
    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        return self._local.empty(count, dtype)

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        return self._gloo.message(sends, array, dtype, None if peer < 0 else peer, tag, self._seconds)

    def _start(self, request: Request, array: Array, out: Array) -> Work:
        kind, dtype, label, op, root, _ = request[:6]
        run = self._runs[kind]
        arrays = (array.reshape(-1),) if out is array else (array.reshape(-1), out.reshape(-1))
        count = min(array.size, out.size)
        work = _Deferred(self, Description(kind, count, dtype, op, label, root), lambda call: run(self, call, *arrays))
        if self.begins_at_once and kind == "all_reduce" and all(one.leaves(array) for one in self._under_way):
            work.begin(lambda call: self._begin_reduce(call, *arrays), array)
        self._under_way.append(work)
        return work

    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        received: list[Array] = []
        parts = list(parts) if len(parts) == self._size else [*parts] * self._size
        run = partial(self._exchange, parts=parts, received=received)
        work = _Deferred(self, Description(request.kind, 0, request.dtype, "", request.label), run)
        self._under_way.append(work)
        return RaggedWork(work, received)

    # -- all_reduce --------------------------------------------------------------------------------------------------
    def _reduce(self, call: Description, flat: Array) -> None:
        if call.op == "mean" and not self._even:
            self._reduce_mean(call, flat)
        else:
            self._begin_reduce(call, flat)()

    def _begin_reduce(self, call: Description, flat: Array) -> Callable[[], None]:
        """Collective in this host. Start a reduction, and return a function that completes it.

        The heads carry a small array as a whole. Of a large one, they carry the rest that does not divide into slices
        and, between two hosts, the slice too, if it is small.
        """
        if flat.nbytes <= self._between.whole_bytes:
            return partial(self._finish_small, call, [flat], self._begin_small(call, [flat]))
        cut = flat.size - flat.size % self._n_slices
        head, rest = flat[:cut], flat[cut:]
        call.n_bytes = flat.nbytes
        slice_bytes = head.nbytes // self._n_slices
        if len(self._hosts) == 2 and slice_bytes + rest.nbytes <= self._between.inline_bytes:
            chunk = self._begin_chunk(call, head, sends=False)
            arrays = [rest] if chunk.part is None else [chunk.part, rest]
            return partial(self._finish_large, call, arrays, self._begin_small(call, arrays), deque([chunk]), iter(()))
        chunk_bytes = min(max(slice_bytes // _CHUNKS, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        length = chunk_bytes // flat.itemsize * self._n_slices
        begun = (self._begin_chunk(call, head[at : at + length]) for at in range(0, head.size, length))
        reducing = deque(islice(begun, _CHUNKS_REDUCED))
        return partial(self._finish_large, call, [rest], self._begin_small(call, [rest]), reducing, begun)

    def _finish_large(
        self,
        call: Description,
        arrays: list[Array],
        heads: Heads,
        reducing: deque[_Chunk],
        begun: Iterator[_Chunk],
    ) -> None:
        """Collective in this host. Reduce the data in the heads, then the chunks, with several on the network."""
        self._finish_small(call, arrays, heads)
        gathering: deque[_Chunk] = deque()
        while reducing:
            gathering.append(reducing.popleft())
            reducing.extend(islice(begun, 1))
            if (exchange := gathering[-1].exchange) is not None:
                exchange.reduce()
            if len(gathering) > _CHUNKS_GATHERED:
                self._finish_chunk(call, gathering.popleft())
        for chunk in gathering:
            self._finish_chunk(call, chunk)

    def _begin_small(self, call: Description, arrays: list[Array]) -> Heads:
        """Collective in this host. Reduce the last array inside the host, and start to send all arrays in heads."""
        if len(self._mine) > 1 and _takes_part(call, arrays[-1]):
            self._local.all_reduce(arrays[-1], call.op, wire=call.dtype, label=call.within).wait(call.left())
        full = [array for array in arrays if array.size] or arrays
        data = full[0] if len(full) == 1 else np.concatenate(full)
        return self._between.announce(call, dict.fromkeys(self._others, bytes_of(data)))

    def _finish_small(self, call: Description, arrays: list[Array], heads: Heads) -> None:
        """Collective in this host. Reduce the data in the heads."""
        theirs, end = heads.wait(), 0
        for array in arrays if self._carriers else ():
            begin, end = end, end + array.nbytes
            pieces = {q: data[begin:end].view(array.dtype) for q, data in theirs.items()}
            fold(call, [pieces.get(q, array) for q in self._carriers], array)
        self._between.end(heads)
        if not self._even and _takes_part(call, arrays[-1]):
            self._local.broadcast(arrays[-1], wire=call.dtype, label=call.within).wait(call.left())

    def _reduce_mean(self, call: Description, flat: Array) -> None:
        """The mean over hosts with different numbers of ranks: the sum, divided once."""
        numbers = torch.from_numpy(flat).view(getattr(torch, call.dtype))
        wide = numbers.float() if numbers.itemsize == 2 else numbers
        dtype = str(wide.dtype).removeprefix("torch.")
        self._reduce(replace(call, dtype=dtype, op="sum", label=f"mean {call.label}"), array_of(wide))
        numbers.copy_(wide.div_(self._size))

    def _begin_chunk(self, call: Description, array: Array, *, sends: bool = True) -> _Chunk:
        """Collective in this host. Reduce a chunk inside the host, and start to send its slices to other hosts."""
        part: Array | None = None
        if self._carriers:
            count, place = array.size // self._n_slices, self.topology.local_rank
            part = array[place * count : (place + 1) * count]
        if len(self._mine) > 1:
            if self._even:
                work = self._local.reduce_scatter(array, part, call.op, wire=call.dtype, label=call.within)
            else:
                work = self._local.all_reduce(array, call.op, wire=call.dtype, label=call.within)
            work.wait(call.left())
        if part is None or not sends:
            return _Chunk(array, part, None)
        return _Chunk(array, part, Exchange(self._between, call, part, self._carriers, self._rank))

    def _finish_chunk(self, call: Description, chunk: _Chunk) -> None:
        """Collective in this host. Give the reduced chunk to all ranks of the host."""
        if chunk.exchange is not None:
            chunk.exchange.finish()
        if not self._even:
            for place, each in enumerate(np.split(chunk.array, self._n_slices)):
                self._local.broadcast(each, place, wire=call.dtype, label=call.within).wait(call.left())
        elif len(self._mine) > 1:
            self._local.all_gather(chunk.part, chunk.array, wire=call.dtype, label=call.within).wait(call.left())

    # -- other collectives -------------------------------------------------------------------------------------------
    def _scatter(self, call: Description, array: Array, out: Array) -> None:
        between = self._between
        heads = between.announce(call, dict.fromkeys(self._others, NOTHING))
        call.n_bytes = array.nbytes
        rooms = {q: between.take(out.nbytes).view(out.dtype) for q in self._others}
        moves = [between.receive(call, room, q) for q, room in rooms.items()]
        parts = {}
        for ranks, carrier in zip(self._hosts, self._carriers, strict=True):
            wholes = [array[q * out.size : (q + 1) * out.size] for q in ranks]
            parts[carrier] = wholes[0]
            if len(ranks) > 1:
                part = parts[carrier] = between.take(out.nbytes).view(out.dtype)
                whole = np.concatenate(wholes)
                work = self._local.reduce_scatter(whole, part, call.op, wire=call.dtype, label=call.within)
                work.wait(call.left())
            if carrier != self._rank:
                moves.append(between.send(call, parts[carrier], carrier))
        heads.wait()
        between.end(heads)
        between.wait(call, moves)
        fold(call, [rooms.get(q, parts[self._rank]) for q in self._carriers], out)
        for memory in (*rooms.values(), *(parts.values() if len(self._mine) > 1 else ())):
            between.give(memory)

    def _scatter_unevenly(self, call: Description, array: Array, out: Array) -> None:
        whole = array.copy()
        self._reduce(replace(call, kind="all_reduce", label=f"reduce_scatter {call.label}"), whole)
        out[...] = whole[self._rank * out.size :][: out.size]

    def _gather(self, call: Description, array: Array, out: Array) -> None:
        between, alone = self._between, len(self._mine) == 1
        heads = between.announce(call, dict.fromkeys(self._others, NOTHING))
        call.n_bytes = out.nbytes
        places = np.split(out, self._size)
        rooms = {q: places[q] if alone else between.take(array.nbytes).view(array.dtype) for q in self._others}
        moves = [between.receive(call, room, q) for q, room in rooms.items()]
        moves += [between.send(call, array, q) for q in self._others]
        heads.wait()
        between.end(heads)
        between.wait(call, moves)
        if alone:
            places[self._rank][...] = array
            return
        for ranks, carrier in zip(self._hosts, self._carriers, strict=True):
            whole = np.empty(array.size * len(ranks), array.dtype)
            part = rooms.get(carrier, array)
            self._local.all_gather(part, whole, wire=call.dtype, label=call.within).wait(call.left())
            for q, each in zip(ranks, np.split(whole, len(ranks)), strict=True):
                places[q][...] = each
        for room in rooms.values():
            between.give(room)

    def _gather_unevenly(self, call: Description, array: Array, out: Array) -> None:
        received: list[Array] = []
        label = f"all_gather of {array.size} {call.label}"
        parts = [bytes_of(array)] * self._size
        self._exchange(replace(call, kind="all_gather_ragged", count=0, label=label), parts, received)
        np.concatenate(received, out=bytes_of(out))

    def _spread(self, call: Description, array: Array) -> None:
        """Send to one rank of every other host, which broadcasts inside its host."""
        root, between = call.root, self._between
        firsts = {root if root in ranks else ranks[0] for ranks in self._hosts}
        first = next(q for q in self._mine if q in firsts)
        peers = (firsts - {root} if self._rank == root else {root}) if self._rank == first else set()
        small = array.nbytes <= between.inline_bytes
        heads = between.announce(call, dict.fromkeys(peers, bytes_of(array) if small and first == root else NOTHING))
        call.n_bytes = array.nbytes
        move = between.send if self._rank == root else between.receive
        moves = [] if small else [move(call, array, peer) for peer in peers]
        theirs = heads.wait()
        if small and self._rank != root and theirs:
            bytes_of(array)[...] = theirs[root]
        between.end(heads)
        between.wait(call, moves)
        self._local.broadcast(array, self._mine.index(first), wire=call.dtype, label=call.within).wait(call.left())

    def _exchange(self, call: Description, parts: Sequence[Array], received: list[Array]) -> None:
        between = self._between
        work = self._local.all_to_all_ragged([parts[q] for q in self._mine], label=call.within)
        data = {q: bytes_of(parts[q]) for ranks in self._hosts if ranks is not self._mine for q in ranks}
        heads = between.announce(call, data)
        moves = []
        for q, each in data.items():
            if each.size > between.inline_bytes:
                call.n_bytes = each.size
                moves.append(between.send(call, each, q))
        work.wait(call.left())
        results = dict(zip(self._mine, work.parts, strict=True))
        for q, payload in heads.wait().items():
            call.n_bytes = heads.sizes[q]
            results[q] = payload.copy()
            if call.n_bytes > between.inline_bytes:
                results[q] = np.empty(call.n_bytes, np.uint8)
                moves.append(between.receive(call, results[q], q))
        between.end(heads)
        between.wait(call, moves)
        received.extend(results[q].view(parts[0].dtype) for q in range(self._size))


def _takes_part(call: Description, rest: Array) -> bool:
    """Whether the ranks of a host reduce the rest of an array: if there is one, or if the whole array is empty.

    An empty array must take part, so that the ranks find out if the array of another rank is not empty.
    """
    return rest.size > 0 or call.count == 0


class _Chunk(NamedTuple):
    """A piece of a large array: the slice that this rank carries, or None, and its exchange with other hosts."""

    array: Array
    part: Array | None
    exchange: Exchange | None


class _Deferred(Work):
    """The work of an operation. `wait` carries it out, or completes it if it has started."""

    def __init__(self, owner: HostsCommunicator, call: Description, run: Callable[[Description], None]) -> None:
        self._owner = owner
        self._call = call
        self._run: Callable[[Description], None] | None = run
        self._array: Array | None = None

    def begin(self, start: Callable[[Description], Callable[[], None]], array: Array) -> None:
        """Local. Start it by `start`, which returns a function that completes it. `array` is in use until then."""
        finish = self._owner.carry_out(self._call, start, None)
        self._run, self._array = lambda _: finish(), array

    def leaves(self, array: Array) -> bool:
        """Local. Whether an operation on `array` may start: this one has started, and uses other memory."""
        return self._array is not None and not np.may_share_memory(self._array, array)

    def carry_out(self, timeout: float | None) -> int:
        """Collective. Carry out this operation, the oldest one under way; its number."""
        assert self._run is not None
        self._owner.carry_out(self._call, self._run, timeout)
        self._run = None
        return self._call.number

    def done(self) -> bool:
        """Collective. Carry out the operation, and all earlier ones."""
        self.wait()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Collective. Carry out the operation, and all earlier ones; see `Work.wait`.

        Each waits at most `timeout` seconds for the other ranks.
        """
        while self._run is not None:
            self._owner.carry_out_oldest(timeout)
