"""Operations of ranks on different hosts, through PyTorch's Gloo: a description of each, and the data.

The description travels beside the data, so that ranks which call different collectives raise an error. Their data never
meet, since the tag of a message contains its length: Gloo would end the process.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import _core
from ...comm.base import DTYPES, OPS, Array
from ...errors import Call, CommunicatorError, MismatchError
from ..tensors import bytes_of

if TYPE_CHECKING:
    from .gloo import Gloo, Transfer

# At the head of a rank's first message: bytes of its data, and what it calls. Gloo keeps messages of one tag in order.
_HEAD_TAG = 0
_SIZE_BYTES, _CALL_BYTES = 8, 248
_HEAD_BYTES = _SIZE_BYTES + _CALL_BYTES
# Between two hosts, data of up to this size over the number of carriers travel with it: to copy them takes less time
# than a message of their own.
_INLINE_BYTES_OF_TWO = 4 << 20
# An array up to twice this over the number of hosts travels as a whole from each of several carriers to every host. A
# larger one would cross the network more often than necessary.
_WHOLE_BYTES = 64 << 10
_MOST_SCRATCH, _LARGEST_SCRATCH_BYTES = 32, 4 << 20  # arrays, and first messages, that are kept
NOTHING = np.empty(0, np.uint8)


@dataclass(slots=True)
class Operation:
    """A collective as this rank has called it.

    Attributes:
        kind, count, dtype, op, label, root: see `distopt.errors.Call`.
        number: its place in the order of operations.
        deadline: on the clock of `time.monotonic`.
        n_bytes: of the data that it moves, which become part of the tag of their messages.
    """

    kind: str
    count: int
    dtype: str
    op: Any
    label: str
    root: int = 0
    number: int = 0
    deadline: float = 0.0
    n_bytes: int = 0

    @property
    def within(self) -> str:
        """Local. Label of what a host's ranks call for it."""
        return f"{self.kind} {self.count:,} {self.label}".rstrip()

    def left(self) -> float:
        """Local. Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def tag(self, phase: int = 0) -> int:
        """Local. Of its data, in one of two phases."""
        return (self.number & 0x3FFF) << 16 | 2 * (1 + self.n_bytes % 0x7FFE) + phase

    def packed(self) -> bytes:
        """Local. What ranks must agree on."""
        label = f"{zlib.crc32(self.label.encode())}|{self.label[:31]}"  # cut, but compared as a whole
        text = f"{self.kind}|{self.count}|{self.dtype}|{self.op}|{self.root}|{self.number}|{label}"
        return text.encode().ljust(_CALL_BYTES)

    @classmethod
    def unpacked(cls, packed: bytes) -> Operation:
        """Local. What another rank says."""
        kind, count, dtype, op, root, number, _, label = packed.decode().rstrip().split("|", 7)
        return cls(kind, int(count), dtype, op, label, int(root), int(number))

    def describe(self) -> str:
        """Local. In words, as those of csrc/host/describe.cpp."""
        text = f"{self.kind} #{self.number:,}"
        if not self.kind.endswith("ragged"):
            text += f" of {self.count:,} {self.dtype}"
        if self.op:
            text += f", {self.op}"
        if self.kind == "broadcast":
            text += f" from rank {self.root}"
        return f"{text} ({self.label})" if self.label else text

    def call(self, rank: int) -> Call:
        """Local. As the call of a rank."""
        return Call(rank, self.kind, self.number, self.count, self.dtype, self.op, self.root, self.label)


class Between:
    """The messages between one rank and ranks of other hosts, in its operations.

    Attributes:
        inline_bytes: size of the data that travel with the description of an operation.
        whole_bytes: size of an array that each carrier sends as a whole.
    """

    def __init__(self, gloo: Gloo, n_hosts: int, n_carriers: int) -> None:
        self.gloo = gloo
        whole = 2 * _WHOLE_BYTES // n_hosts
        self.inline_bytes = max(whole, _INLINE_BYTES_OF_TWO // n_carriers) if n_hosts == 2 else whole
        self.whole_bytes = self.inline_bytes if n_carriers == 1 else whole
        # Of the next heads, by rank: begun early, since Gloo sends data when it knows that they are awaited.
        self._begun: dict[int, tuple[_Box, Transfer]] = {}
        self._free: list[_Box] = []
        self._scratch: list[Array] = []

    def meet(self, step: Operation, data: Mapping[int, Array]) -> Meeting:
        """Local. Say what this rank does, with `data`, to some ranks, which do the same. To be ended by `end`."""
        meeting = Meeting(self, step)
        begun = self._begun
        meeting.receives = {q: begun.pop(q) if q in begun else self._receive_next(q) for q in data}
        for rank, each in data.items():
            box, inline = self._box(), each if each.size <= self.inline_bytes else NOTHING
            end = _HEAD_BYTES + inline.size
            box.head[:] = each.size.to_bytes(_SIZE_BYTES, "little") + meeting.said
            box.array[_HEAD_BYTES:end] = inline
            meeting.sends.append((box, self.gloo.send(box.tensor[:end], rank, _HEAD_TAG, step.describe)))
        return meeting

    def end(self, meeting: Meeting) -> None:
        """Local, after `Meeting.wait`. What others have said in it is no longer needed."""
        self._free += [box for box, _ in (*meeting.sends, *meeting.receives.values())]
        del self._free[_MOST_SCRATCH:]
        with suppress(CommunicatorError):  # the next operation meets the same
            for rank in meeting.receives:
                if rank not in self._begun:
                    self._begun[rank] = self._receive_next(rank)

    def _receive_next(self, rank: int) -> tuple[_Box, Transfer]:
        box = self._box()
        return box, self.gloo.receive(box.tensor, rank, _HEAD_TAG, lambda: "its next operation")

    def _box(self) -> _Box:
        return self._free.pop() if self._free else _Box(self.inline_bytes)

    def close(self) -> None:
        """Local. Forget the receives that were begun, which hold connections."""
        self._begun.clear()

    def send(self, step: Operation, array: Array, to: int, phase: int = 0) -> Transfer:
        """Local. Begin to send to a rank that awaits as much."""
        return self.gloo.send(torch.from_numpy(bytes_of(array)), to, step.tag(phase), step.describe)

    def receive(self, step: Operation, array: Array, source: int, phase: int = 0) -> Transfer:
        """Local. Begin to receive."""
        return self.gloo.receive(torch.from_numpy(bytes_of(array)), source, step.tag(phase), step.describe)

    def wait(self, step: Operation, transfers: Sequence[Transfer]) -> None:
        """Wait for the end of all; see `Gloo.wait`."""
        for transfer in transfers:
            self.gloo.wait(transfer, step.deadline, step.describe)

    def take(self, n_bytes: int) -> Array:
        """Local. Scratch memory of `n_bytes`, as a flat array of bytes; fresh memory would cost page faults."""
        for i, memory in enumerate(self._scratch):
            if memory.size >= n_bytes:
                return self._scratch.pop(i)[:n_bytes]
        return np.empty(n_bytes, np.uint8)

    def give(self, array: Array) -> None:
        """Local. What `take` has given can be used again."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        if len(self._scratch) < _MOST_SCRATCH and array.nbytes <= _LARGEST_SCRATCH_BYTES:
            self._scratch.append(array)


class _Box:
    """Memory of a first message, as an array and as a tensor."""

    def __init__(self, inline_bytes: int) -> None:
        self.array = np.empty(_HEAD_BYTES + inline_bytes, np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self.head = memoryview(self.array)[:_HEAD_BYTES]  # type: ignore[arg-type]


class Meeting:
    """The descriptions of an operation that some ranks exchange, with small data. `Between.meet` makes it.

    Attributes:
        said: by this rank.
        receives, sends: the messages, and where they lie.
        sizes: bytes that each rank has for this one, once `wait` has returned.
    """

    def __init__(self, between: Between, step: Operation) -> None:
        self.said = step.packed()
        self.receives: dict[int, tuple[_Box, Transfer]] = {}
        self.sends: list[tuple[_Box, Transfer]] = []
        self.sizes: dict[int, int] = {}
        self._between, self._step = between, step

    def wait(self) -> dict[int, Array]:
        """The data of each rank, until `Between.end`; empty where they are too long to travel with what it says.

        Raises:
            MismatchError: a rank does something else.
        """
        between, step, theirs = self._between, self._step, {}
        for rank, (box, transfer) in self.receives.items():
            between.wait(step, [transfer])
            head = bytes(box.head)
            if head[_SIZE_BYTES:] != self.said:
                raise self._mismatch(rank, head[_SIZE_BYTES:])
            size = self.sizes[rank] = int.from_bytes(head[:_SIZE_BYTES], "little")
            theirs[rank] = box.array[_HEAD_BYTES:][: size if size <= between.inline_bytes else 0]
        between.wait(step, [transfer for _, transfer in self.sends])
        return theirs

    def _mismatch(self, rank: int, said: bytes) -> MismatchError:
        other, me = self._between.gloo.processes[rank], self._between.gloo.me
        theirs = Operation.unpacked(said)
        return MismatchError(
            f"{other.name} is in {theirs.describe()}, {me.name} in {self._step.describe()}",
            cure="all ranks must call the same collectives in the same order with equal types and counts",
            ranks=[other, me],
            calls=[theirs.call(other.rank), self._step.call(me.rank)],
        )


class Exchange:
    """A reduction over ranks of different hosts under way.

    Two ranks send each other all that they have: one message time, and as many bytes as by pieces. More send the others
    their pieces, reduce their own, and gather the results (Rabenseifner, "Optimization of Collective Reduction
    Operations", ICCS 2004).
    """

    def __init__(self, between: Between, step: Operation, part: Array, ranks: Sequence[int], rank: int) -> None:
        """Local. Begin to send.

        Args:
            between: moves the data.
            step: the operation.
            part: what this rank has, a flat array; it gets the result.
            ranks: all that take part, in the order of the sum.
            rank: this one among them.
        """
        self._between, self._step, self._ranks = between, step, ranks
        self._others = [q for q in ranks if q != rank]
        bounds = [part.size * i // len(ranks) for i in range(len(ranks) + 1)]
        self._whole = len(ranks) == 2
        self._pieces = {q: part if self._whole else part[bounds[i] : bounds[i + 1]] for i, q in enumerate(ranks)}
        self._own = own = self._pieces[rank]
        self._rooms = {q: between.take(own.nbytes).view(own.dtype) for q in self._others}
        self._moves = [between.receive(step, self._rooms[q], q) for q in self._others]
        self._moves += [between.send(step, self._pieces[q], q) for q in self._others]

    def reduce(self) -> None:
        """Wait for what comes, add it up, and begin to send the result to those who have none."""
        between, step, own = self._between, self._step, self._own
        between.wait(step, self._moves)
        fold(step, [self._rooms.get(q, own) for q in self._ranks], own)
        for room in self._rooms.values():
            between.give(room)
        self._moves = []
        if not self._whole:
            self._moves = [between.receive(step, self._pieces[q], q, 1) for q in self._others]
            self._moves += [between.send(step, own, q, 1) for q in self._others]

    def finish(self) -> None:
        """After `reduce`: wait until the result is in place."""
        self._between.wait(self._step, self._moves)


def fold(step: Operation, parts: Sequence[Array], out: Array) -> None:
    """Local. `out` = the reduction of the parts in their order."""
    _core.reduce([out], list(parts), DTYPES[step.dtype], OPS[step.op])
