"""The interface of all communicators, over shared memory, MPI and NCCL.

All collectives work on contiguous arrays in place or into an array that the caller gives, return a `Work`, and are
*collective*: every rank of the job must call the same ones in the same order with equal types and counts. If a rank
does not, all get a `MismatchError` that names it; no rank waits forever. Sums run in rank order on every element, so
the same call gives the same bits on all ranks and on every run of the same layout. Two exceptions keep that promise in
another order: where hosts have several ranks each, large arrays are summed host by host (`by_host_above_bytes`;
`$DISTOPT_SUM_ORDER=rank` forbids it), and NCCL has an order of its own. Counts are elements.

Memory: `out` and `array` of a collective share none, unless the smaller one is exactly this rank's part of the larger
one; ranks may differ in this. Arrays that are only read may overlap freely. Collectives in progress may use the same
memory: each sees the results of earlier ones. Messages are outside that order: an array to be received is left
alone until its message has ended, and one that is sent is only read.

Every rank checks its own arguments before anything is sent. A rank with a UsageError has not taken part: the others
wait until it calls again with valid arguments.

Progress: to start, poll or wait for any operation moves every collective and message of its communicator, so ranks may
poll and wait for them in different orders. It moves nothing of other communicators, subgroups included: ranks that have
operations under way in several wait for them in the same order, or call `progress` of the others while they poll.

Threads: any thread may call, but one at a time per communicator and its works, `done` and `wait` included, and in the
same order on all ranks. The communicators over shared memory and MPI refuse a second thread (`UsageError`). Messages
between two ranks may be sent and received by several threads at the same time.
Waiting releases the GIL or sleeps, so that other threads run.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..checks import check_integer
from ..errors import UsageError
from ..kernels import address_of, check_unmasked
from ..launch.end_together.report import supervisor
from ..launch.job.topology import Topology
from ..recorder.flight import flight_record
from ..recorder.ring import GroupRecord
from .subgroups import meet
from .types import DTYPES, NAMES, OPS, ReduceOp, is_defined, storage_of
from .work import Array, DoneWork, MessageWork, RaggedWork, Work

__all__ = [
    "DTYPES",
    "OPS",
    "Array",
    "Communicator",
    "DoneWork",
    "MessageWork",
    "RaggedWork",
    "ReduceOp",
    "Request",
    "Work",
    "storage_of",
]

_ANYONE = -1  # the source of a message may be any rank


class Request(NamedTuple):
    """The arguments of a collective for its transport, except its arrays.

    Attributes:
        kind: name of the method that was called.
        dtype: wire type.
        label: see `Communicator.all_reduce`.
        op: the reduction; empty where there is none.
        root: the rank that a broadcast comes from.
        looks: whether to look for NaN and infinity.
        counts: of a ragged collective, how many elements every rank sends, if the ranks know it.
    """

    kind: str
    dtype: str
    label: str
    op: str = ""
    root: int = 0
    looks: bool = False
    counts: Sequence[int] | None = None


class Communicator(ABC):
    """Collectives over the ranks of a job.

    The public methods check their arguments, note the operation in the flight record and call the transport; they are
    no-ops (apart from the checks) in a job of one rank.

    A transport is a subclass that sets `name` and `topology`, and defines `barrier`, `close`, `_empty`, `_start` and
    `_start_ragged`; and, as one of `TRANSPORTS`, the class method `create(job)`, which is collective. If it can, it
    also defines `_subgroup` and `_start_message`; `progress`, if bytes do not move by themselves; and `together`. Where
    it takes less than others, it declares that by `dtypes`, `ops`, `_moves` or `can_reduce`. The variables below tell
    the callers what they gain by it. A transport of csrc is a `NativeCommunicator`, which has most of this already.
    """

    name: ClassVar[str]
    # The keys of `DTYPES` and of `OPS` that the transport takes.
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    ops: ClassVar[tuple[str, ...]] = tuple(OPS)
    # The transport's own array module: numpy or cupy.
    xp: Any = np
    topology: Topology
    # Whether sums of lists should travel as parts, by `all_to_all_ragged`; shared memory needs no transfer.
    sends_parts: ClassVar[bool] = False
    # Whether sums run in rank order on every element; if not, in an order of the library's, the same on all ranks.
    ordered_sums: ClassVar[bool] = True
    # Arrays above this size are summed over the ranks of every host in rank order, then over the hosts in the order of
    # their first ranks; a rest that cannot be dealt out equally to the ranks of a host, in rank order. Sums of 16 bits
    # are rounded once per host. None: no array is. 0: all are, with their rests, and the sums of reduce_scatter.
    by_host_above_bytes: int | None = None
    # Whether `all_reduce` takes `find_nonfinite`.
    finds_nonfinite: ClassVar[bool] = False
    # Whether arrays from `empty` are reduced where they lie, others through copies.
    reduces_in_place: bool = False
    # Whether bytes move while this rank computes, so that starting early pays.
    overlaps: ClassVar[bool] = False
    # Whether messages move while this rank computes; if so, their `done` need not be asked.
    moves_messages: ClassVar[bool] = False
    # Local. A context: collectives that are started inside may travel as one, where the transport gains by it. Wait for
    # none of them inside. Each has its own work, and may be waited for alone afterwards.
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    # Whether `close` was called here.
    closed: bool = False
    # Where operations are noted; see `record`.
    flight: GroupRecord | None = None

    # -- memory ------------------------------------------------------------------------------------------------------
    def empty(self, count: int, dtype: str = "float32", *, xp: Any = None) -> Array:
        """Collective. An uninitialised flat array in *wire memory*, which this transport reduces without copying.

        All ranks must call it in the same order with the same arguments. The memory lives as long as the communicator
        or any view of it.

        Args:
            count: number of elements.
            dtype: a key of `DTYPES`; bfloat16 gives uint16.
            xp: module of the array, numpy or cupy (default: the transport's own).

        Raises:
            UsageError: the transport does not move arrays of that module.
            WireMemoryError: the memory does not fit.
        """
        if dtype not in self.dtypes:
            raise UsageError(
                f"the {self.name} communicator has no wire type {dtype!r}; choose one of {', '.join(self.dtypes)}"
            )
        count = check_integer("the count of elements", count, 0)
        xp = self.xp if xp is None else xp
        if not self._moves(xp):
            raise self._cannot_move(xp)
        return self._empty(count, dtype, xp)

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(
        self,
        array: Array,
        op: ReduceOp = "sum",
        *,
        wire: str | None = None,
        label: str = "",
        find_nonfinite: bool = False,
    ) -> Work:
        """Collective. Replace `array` on every rank by the element-wise reduction over all ranks.

        It changes `array` and returns at once; `World.all_reduce` waits, changes nothing and returns the result.

        Args:
            array: any shape; 16-bit floats are accumulated in float32 and rounded once.
            op: "mean" is the sum divided by the world size, for floating types; "and", "or" and "xor" are as for
                bits, for the others. Sums and products of integers wrap around. As in NumPy, the sum and the maximum
                of booleans are their "or", product and minimum their "and".
            wire: wire type, if the array's own dtype does not determine it ("bfloat16" in uint16).
            label: shown in diagnostics (at most 31 bytes are kept).
            find_nonfinite: look for NaN and infinity in a sum or mean of float32 or float64 while it is made, which
                costs next to nothing; only where `finds_nonfinite`. `Work.nonfinite` of every rank is then None or the
                first such element, as rank at fault and index. That rank is the first whose own value is not finite
                or, where a sum of finite values overflowed, the first whose value has the largest magnitude.
        """
        dtype = self.check_array(array, wire, written=True)
        self._check_op(op, dtype)
        can_look = self.finds_nonfinite and op in ("sum", "mean") and dtype in ("float32", "float64")
        if find_nonfinite and not can_look:
            raise UsageError(f"the {self.name} communicator cannot look for NaN in a {op} of {dtype}")
        return self._start(
            self._note(Request("all_reduce", dtype, label, op, looks=find_nonfinite), array.size), array, array
        )

    def reduce_scatter(
        self, array: Array, out: Array, op: ReduceOp = "sum", *, wire: str | None = None, label: str = ""
    ) -> Work:
        """Collective. `out` (count elements) = this rank's part of the reduction of `array` (world_size * count).

        In place, `out` is `array[rank * count : (rank + 1) * count]`; no other overlap is allowed.
        """
        dtype = self.check_array(array, wire)
        self._check_op(op, dtype)
        self.check_array(out, wire, written=True)
        self._check_pair(out, array)
        return self._start(self._note(Request("reduce_scatter", dtype, label, op), out.size), array, out)

    def all_gather(self, array: Array, out: Array, *, wire: str | None = None, label: str = "") -> Work:
        """Collective. `out` (world_size * count) = the `array` (count elements) of every rank, in rank order.

        In place, `array` is `out[rank * count : (rank + 1) * count]`; no other overlap is allowed.
        """
        dtype = self.check_array(array, wire)
        self.check_array(out, wire, written=True)
        self._check_pair(array, out)
        return self._start(self._note(Request("all_gather", dtype, label), array.size), array, out)

    def all_gather_ragged(self, array: Array, *, label: str = "", counts: Sequence[int] | None = None) -> RaggedWork:
        """Collective. The flat arrays of every rank; counts may differ, zero included.

        The call does not wait for other ranks; over NCCL, it waits for the counts, unless they are given.

        Args:
            array: what this rank sends.
            label: see `all_reduce`.
            counts: how many elements every rank sends, if all ranks know it: some transports then need not exchange it.

        Raises:
            UsageError: the array cannot be sent, or is not as long as its count.
        """
        dtype = self.check_array(array)
        if counts is not None and (len(counts) != self.topology.world_size or counts[self.topology.rank] != array.size):
            raise UsageError(f"counts {list(counts)} do not fit {array.size} elements of rank {self.topology.rank}")
        return self._start_ragged(
            self._note(Request("all_gather_ragged", dtype, label, counts=counts), array.size), [array]
        )

    def all_gather_bytes(self, payload: bytes, *, label: str = "bytes") -> list[bytes]:
        """Collective; waits. The payload of every rank, in rank order; lengths may differ. For set-up only.

        Args:
            payload: what this rank sends.
            label: see `all_reduce`.
        """
        words = np.frombuffer(len(payload).to_bytes(8, "little") + payload + bytes(-len(payload) % 4), np.int32)
        work = self.all_gather_ragged(words, label=label)
        work.wait()
        gathered = [part.tobytes() for part in work.parts]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in gathered]

    def all_to_all_ragged(self, parts: Sequence[Array], *, label: str = "") -> RaggedWork:
        """Collective. Send `parts[r]` to rank r; the result is the parts sent to this rank.

        Parts are flat, of one type and any length, zero included. The call does not wait for other ranks; over NCCL, it
        waits for the counts.
        """
        if len(parts) != self.topology.world_size:
            raise UsageError(f"{len(parts)} parts were given for {self.topology.world_size} ranks")
        dtypes = {self.check_array(part) for part in parts}
        if len(dtypes) != 1:
            raise UsageError(f"the parts are of several types: {', '.join(sorted(dtypes))}")
        check_kinds(*parts)
        return self._start_ragged(
            self._note(Request("all_to_all_ragged", dtypes.pop(), label), sum(part.size for part in parts)), parts
        )

    def broadcast(self, array: Array, root: int = 0, *, wire: str | None = None, label: str = "") -> Work:
        """Collective. Overwrite `array` on every rank with the array of rank `root`."""
        dtype = self.check_array(array, wire, written=True)
        root = check_integer("root", root, 0, self.topology.world_size)
        return self._start(self._note(Request("broadcast", dtype, label, root=root), array.size), array, array)

    # -- messages between two ranks ----------------------------------------------------------------------------------
    def send(self, array: Array, to: int, *, tag: int = 0, wire: str | None = None) -> MessageWork:
        """Local. Send `array` to rank `to`, which receives it with an equal tag, type and count.

        Messages have no place in the order of collectives. Those between two ranks with one tag arrive in the order of
        sending. They move while this rank starts, polls or waits for one of them or for a collective; a send may not
        end before its receive begins.

        Args:
            array: any shape; it must not change until the message has ended.
            to: another rank.
            tag: an integer of 64 bits.
            wire: see `all_reduce`.

        Raises:
            UsageError: the array cannot be sent, or `to` is not another rank.
        """
        return self._start_message(
            True, array, self.check_array(array, wire), self._other(to), check_integer("tag", tag)
        )

    def receive(self, array: Array, source: int | None = None, *, tag: int = 0, wire: str | None = None) -> MessageWork:
        """Local. Receive a message into `array`, from rank `source` or from any; see `send`.

        `Work.wait` raises a MismatchError if type or count are not those of the message.
        """
        peer = _ANYONE if source is None else self._other(source)
        return self._start_message(
            False, array, self.check_array(array, wire, written=True), peer, check_integer("tag", tag)
        )

    @abstractmethod
    def barrier(self) -> None:
        """Collective. Return when every rank has called it; all earlier operations have finished then."""

    def progress(self) -> None:  # noqa: B027 - where bytes move by themselves there is nothing to do
        """Local. Move outstanding operations forward without waiting."""

    # -- subgroups ---------------------------------------------------------------------------------------------------
    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Collective among `ranks`, and no others. A communicator of these ranks alone, in that order.

        It is independent of this one, and may outlive it. Its messages call the ranks by their numbers here.

        Args:
            ranks: this rank and others, each once; equal on all of them.

        Raises:
            UsageError: this rank is not among them, or they are not ranks.
            StalledError: one of them did not come; PeerLostError if it has ended.
        """
        ranks = [check_integer("a rank of a subgroup", q) for q in ranks]
        rank, world_size = self.topology.rank, self.topology.world_size
        if rank not in ranks or len(set(ranks)) < len(ranks) or not all(0 <= q < world_size for q in ranks):
            raise UsageError(
                f"ranks {ranks} are not a subgroup of a world of {world_size} with rank {rank}; name each member once"
            )
        made = self._subgroup(ranks, meet(self, ranks))
        if self.flight is not None:
            members = [self.flight.ranks[q] for q in ranks]
            made.record(f"{self.flight.name} {members}", members, self.flight.rank)
        return made

    # -- flight record -----------------------------------------------------------------------------------------------
    def record(self, name: str, ranks: Sequence[int], rank: int, offers: Sequence[Any] = ()) -> None:
        """Local. Note all operations in the flight record; see `FlightRecord.open_group`."""
        self.flight = flight_record.open_group(name, ranks, rank, offers)
        supervisor.send("records", ring=flight_record.offer()["ring"])

    def _next_number(self) -> int:
        """The number of the operation that is about to start; equal on all ranks."""
        assert self.flight is not None
        self.flight.count += 1
        return self.flight.count

    def _note(self, request: Request, count: int) -> Request:
        if self.flight is not None:
            self.flight.note(request.kind, DTYPES[request.dtype], count, request.label, self._next_number())
        return request

    # -- arguments ---------------------------------------------------------------------------------------------------
    def _moves(self, xp: Any) -> bool:
        """Whether wire memory can be arrays of that module; a transport may say otherwise."""
        return xp is self.xp

    def check_array(self, array: Array, wire: str | None = None, *, written: bool = False) -> str:
        """Local. The wire type of `array`, or an error that says why it cannot be sent; all collectives ask here.

        Args:
            array: NumPy's on every transport; CuPy's where the transport moves them.
            wire: see `all_reduce`.
            written: whether it receives a result.

        Raises:
            UsageError: module, type, byte order, layout, alignment or writability do not fit.
        """
        on_host = isinstance(array, np.ndarray)
        if type(array) is not np.ndarray:
            check_unmasked(array)
        if not on_host:
            cupy = sys.modules.get("cupy")
            if cupy is None or not isinstance(array, cupy.ndarray):
                raise UsageError(
                    f"an object of type {type(array).__name__} cannot be sent; pass an array of NumPy or CuPy"
                )
            if not self._moves(cupy):
                raise self._cannot_move(cupy)
        dtype = NAMES.get(array.dtype)
        if dtype is None:
            if not array.dtype.isnative:
                order = "big" if sys.byteorder == "little" else "little"
                raise UsageError(
                    f"a {order}-endian array cannot be sent; pass array.astype(array.dtype.newbyteorder('='))"
                )
            dtype = array.dtype.name
        if wire is not None and wire != dtype:
            if (dtype, wire) != ("uint16", "bfloat16"):
                raise UsageError(f"an array of {dtype} cannot travel as {wire}")
            dtype = wire
        if dtype not in self.dtypes:
            raise UsageError(f"arrays of {dtype} cannot be sent; convert to one of {', '.join(self.dtypes)}")
        flags = array.flags
        if not flags.c_contiguous:
            raise UsageError(
                "a strided array cannot be sent or reduced in place; pass a contiguous one (numpy.ascontiguousarray)"
            )
        if not (flags.aligned if on_host else array.data.ptr % array.itemsize == 0):
            raise UsageError(
                f"an array that is not aligned to its {array.itemsize}-byte items cannot be sent; pass array.copy()"
            )
        if written and on_host and not flags.writeable:
            raise UsageError("a read-only array cannot receive the result; pass a writable one")
        return dtype

    def can_reduce(self, op: str, dtype: str) -> bool:
        """Local. Whether this transport has the reduction `op` for that wire type."""
        return dtype in self.dtypes and op in self.ops and is_defined(op, dtype)

    def _check_op(self, op: str, dtype: str) -> None:
        if op not in self.ops:
            raise UsageError(f"unknown reduction {op!r}; choose one of {', '.join(self.ops)}")
        if not is_defined(op, dtype):
            cure = "not be an integer; use op='sum'" if op == "mean" else "be one of their bits; use an integer type"
            raise UsageError(f"the {op} of {dtype} would {cure}")
        if not self.can_reduce(op, dtype):
            raise UsageError(f"the {self.name} communicator has no {op} of {dtype}; reduce another type")

    def _check_pair(self, part: Array, whole: Array) -> None:
        if part.dtype != whole.dtype or part.size * self.topology.world_size != whole.size:
            raise UsageError(
                f"parts of {part.size} {part.dtype} do not make a whole of {whole.size} {whole.dtype} "
                f"on {self.topology.world_size} ranks"
            )
        check_kinds(part, whole)
        rank, count = self.topology.rank, part.size
        if count and overlap(part, whole) and address_of(part) - address_of(whole) != rank * part.nbytes:
            raise UsageError(
                f"input and output overlap, and the smaller one is not rank {rank}'s part of the larger one, "
                f"[{rank * count}:{(rank + 1) * count}] of it; pass a copy of the input, array.copy()"
            )

    def _cannot_move(self, xp: Any) -> UsageError:
        return UsageError(
            f"the {self.name} communicator moves {self.xp.__name__} arrays, and these are of {xp.__name__}; put model "
            "and batches on DistOpt.device, or stay on the CPU with DISTOPT_DEVICE=cpu"
        )

    def _other(self, rank: int) -> int:
        rank = check_integer("the rank of a message", rank)
        if not 0 <= rank < self.topology.world_size or rank == self.topology.rank:
            raise UsageError(
                f"rank {rank} is not another rank of a world of {self.topology.world_size}; messages go to another rank"
            )
        return rank

    # -- life cycle --------------------------------------------------------------------------------------------------
    @abstractmethod
    def close(self) -> None:
        """Local. Give up membership; idempotent. Peers that still wait for this rank get an error."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for transports -----------------------------------------------------------------------------------------------
    @abstractmethod
    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        """Make wire memory; see `empty`. `xp` is a module that `_moves` accepts."""

    @abstractmethod
    def _start(self, request: Request, array: Array, out: Array) -> Work:
        """Start a collective, whose arguments have been checked. In place, `out` is `array`."""

    @abstractmethod
    def _start_ragged(self, request: Request, parts: Sequence[Array]) -> RaggedWork:
        """Start a ragged collective, whose arguments have been checked. `parts`: one for each rank, or one for all."""

    def _subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        """Make a communicator of these ranks, which have all come, and have 16 secret bytes in common."""
        raise UsageError(f"the {self.name} communicator has no subgroups")

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        """Start to send a message or to receive one, whose arguments have been checked. `peer` -1: from any rank."""
        raise UsageError(f"the {self.name} communicator has no messages between two ranks; use all_to_all_ragged")


def overlap(one: Array, other: Array) -> bool:
    """Local. Whether two arrays have memory in common."""
    offset_bytes = address_of(one) - address_of(other)
    return bool(-one.nbytes < offset_bytes < other.nbytes)


def check_kinds(*arrays: Array) -> None:
    """Local. Raises a UsageError if arrays of NumPy and CuPy are mixed."""
    if len({isinstance(array, np.ndarray) for array in arrays}) > 1:
        raise UsageError("one array is NumPy's and the other CuPy's; pass all of one kind")
