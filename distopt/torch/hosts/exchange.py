"""Exchanges between ranks of different hosts, through PyTorch's Gloo.

Each begins with a head, which has the description of the collective, so that ranks that call different collectives
raise an error. Tags contain the length of the data: Gloo would end the process if a message were longer than its
receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import _core
from ...comm.base import DTYPES, OPS, Array
from ...errors import CommunicatorError, MismatchError
from ..tensors import bytes_of
from .description import CALL_BYTES, Description

if TYPE_CHECKING:
    from .gloo import Gloo, Transfer

# A head: the size of the data, the description, then small data themselves. Gloo keeps messages of one tag in order.
_HEAD_TAG = 0
_SIZE_BYTES = 8
_HEAD_BYTES = _SIZE_BYTES + CALL_BYTES
# Between two hosts, data of up to this size divided by the number of carriers are part of the head: a copy takes less
# time than another message.
_INLINE_BYTES_OF_TWO = 4 << 20
# Several carriers of a host each send an array of up to twice this size, divided by the number of hosts, as a whole. A
# larger one is cut into slices, since whole copies would load the network.
_WHOLE_BYTES = 64 << 10
_MOST_SCRATCH, _LARGEST_SCRATCH_BYTES = 32, 4 << 20  # how much memory is kept for further use
NOTHING = np.empty(0, np.uint8)


class Between:
    """One rank's messages to and from ranks of other hosts.

    Attributes:
        inline_bytes: largest size of data in a head.
        whole_bytes: largest size of an array that each carrier sends as a whole.
    """

    def __init__(self, gloo: Gloo, n_hosts: int, n_carriers: int) -> None:
        self.gloo = gloo
        whole = 2 * _WHOLE_BYTES // n_hosts
        self.inline_bytes = max(whole, _INLINE_BYTES_OF_TWO // n_carriers) if n_hosts == 2 else whole
        self.whole_bytes = self.inline_bytes if n_carriers == 1 else whole
        # Receives of the next heads, by rank. They are started early, since Gloo sends data only to a started receive.
        self._begun: dict[int, tuple[_Box, Transfer]] = {}
        self._free: list[_Box] = []
        self._scratch: list[Array] = []

    def announce(self, call: Description, data: Mapping[int, Array]) -> Heads:
        """Local. Start to exchange heads with the ranks in `data`, which do the same. Call `end` after `Heads.wait`."""
        heads = Heads(self, call)
        begun = self._begun
        heads.receives = {q: begun.pop(q) if q in begun else self._receive_next(q) for q in data}
        for rank, each in data.items():
            box, inline = self._box(), each if each.size <= self.inline_bytes else NOTHING
            end = _HEAD_BYTES + inline.size
            box.head[:] = each.size.to_bytes(_SIZE_BYTES, "little") + heads.said
            box.array[_HEAD_BYTES:end] = inline
            heads.sends.append((box, self.gloo.send(box.tensor[:end], rank, _HEAD_TAG, call.describe)))
        return heads

    def end(self, heads: Heads) -> None:
        """Local, after `Heads.wait`. Free the memory of the heads, and start to receive the next ones."""
        self._free += [box for box, _ in (*heads.sends, *heads.receives.values())]
        del self._free[_MOST_SCRATCH:]
        with suppress(CommunicatorError):  # the next operation raises the same error
            for rank in heads.receives:
                if rank not in self._begun:
                    self._begun[rank] = self._receive_next(rank)

    def _receive_next(self, rank: int) -> tuple[_Box, Transfer]:
        box = self._box()
        return box, self.gloo.receive(box.tensor, rank, _HEAD_TAG, lambda: "its next operation")

    def _box(self) -> _Box:
        return self._free.pop() if self._free else _Box(self.inline_bytes)

    def close(self) -> None:
        """Local. Drop the started receives, which keep connections open."""
        self._begun.clear()

    def send(self, call: Description, array: Array, to: int, phase: int = 0) -> Transfer:
        """Local. Start to send to a rank that receives as many bytes."""
        if not array.flags.writeable:  # PyTorch would warn
            array = array.copy()
        return self.gloo.send(torch.from_numpy(bytes_of(array)), to, call.tag(phase), call.describe)

    def receive(self, call: Description, array: Array, source: int, phase: int = 0) -> Transfer:
        """Local. Start to receive into `array`."""
        return self.gloo.receive(torch.from_numpy(bytes_of(array)), source, call.tag(phase), call.describe)

    def wait(self, call: Description, transfers: Sequence[Transfer]) -> None:
        """Wait for the end of all transfers; see `Gloo.wait`."""
        for transfer in transfers:
            self.gloo.wait(transfer, call.deadline, call.describe)

    def take(self, n_bytes: int) -> Array:
        """Local. Scratch memory as a flat uint8 array. It is used again, since fresh memory costs page faults."""
        for i, memory in enumerate(self._scratch):
            if memory.size >= n_bytes:
                return self._scratch.pop(i)[:n_bytes]
        return np.empty(n_bytes, np.uint8)

    def give(self, array: Array) -> None:
        """Local. Give back an array of `take`, or a view of it."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        if len(self._scratch) < _MOST_SCRATCH and array.nbytes <= _LARGEST_SCRATCH_BYTES:
            self._scratch.append(array)


class _Box:
    """The memory of a head, as an array and as a tensor."""

    def __init__(self, inline_bytes: int) -> None:
        self.array = np.empty(_HEAD_BYTES + inline_bytes, np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self.head = memoryview(self.array)[:_HEAD_BYTES]  # type: ignore[arg-type]


class Heads:
    """An exchange of heads between some ranks. `Between.announce` starts it.

    Attributes:
        said: this rank's packed description.
        receives, sends: the memory and the transfer of each head.
        sizes: bytes of the data that each rank has for this one; after `wait`.
    """

    def __init__(self, between: Between, call: Description) -> None:
        self.said = call.packed()
        self.receives: dict[int, tuple[_Box, Transfer]] = {}
        self.sends: list[tuple[_Box, Transfer]] = []
        self.sizes: dict[int, int] = {}
        self._between, self._call = between, call

    def wait(self) -> dict[int, Array]:
        """Wait for all heads. The data in them, by rank, valid until `Between.end`; empty if too large for a head.

        Raises:
            MismatchError: a rank calls another collective.
        """
        between, call, theirs = self._between, self._call, {}
        for rank, (box, transfer) in self.receives.items():
            between.wait(call, [transfer])
            head = bytes(box.head)
            if head[_SIZE_BYTES:] != self.said:
                raise self._mismatch(rank, head[_SIZE_BYTES:])
            size = self.sizes[rank] = int.from_bytes(head[:_SIZE_BYTES], "little")
            theirs[rank] = box.array[_HEAD_BYTES:][: size if size <= between.inline_bytes else 0]
        between.wait(call, [transfer for _, transfer in self.sends])
        return theirs

    def _mismatch(self, rank: int, said: bytes) -> MismatchError:
        other, me = self._between.gloo.processes[rank], self._between.gloo.me
        theirs = Description.unpacked(said)
        return MismatchError(
            f"{other.name} is in {theirs.describe()}, {me.name} in {self._call.describe()}",
            cure="all ranks must call the same collectives in the same order with equal types and counts",
            ranks=[other, me],
            calls=[theirs.of_rank(other.rank), self._call.of_rank(me.rank)],
        )


class Exchange:
    """A reduction over ranks of different hosts, one rank per host.

    Two ranks send each other whole arrays: the same bytes as in pieces, in one message time. More ranks send each other
    pieces, reduce one each, and gather the results (Rabenseifner, "Optimization of Collective Reduction Operations",
    ICCS 2004).
    """

    def __init__(self, between: Between, call: Description, part: Array, ranks: Sequence[int], rank: int) -> None:
        """Local. Start to send.

        Args:
            between: moves the data.
            call: the collective.
            part: a flat array of this rank, which the result overwrites.
            ranks: all ranks that take part, in the order of the sum.
            rank: this rank.
        """
        self._between, self._call, self._ranks = between, call, ranks
        self._others = [q for q in ranks if q != rank]
        bounds = [part.size * i // len(ranks) for i in range(len(ranks) + 1)]
        self._whole = len(ranks) == 2
        self._pieces = {q: part if self._whole else part[bounds[i] : bounds[i + 1]] for i, q in enumerate(ranks)}
        self._own = own = self._pieces[rank]
        self._rooms = {q: between.take(own.nbytes).view(own.dtype) for q in self._others}
        self._moves = [between.receive(call, self._rooms[q], q) for q in self._others]
        self._moves += [between.send(call, self._pieces[q], q) for q in self._others]

    def reduce(self) -> None:
        """Wait for the data of the others, reduce, and start to send the result to ranks that have other pieces."""
        between, call, own = self._between, self._call, self._own
        between.wait(call, self._moves)
        fold(call, [self._rooms.get(q, own) for q in self._ranks], own)
        for room in self._rooms.values():
            between.give(room)
        self._moves = []
        if not self._whole:
            self._moves = [between.receive(call, self._pieces[q], q, 1) for q in self._others]
            self._moves += [between.send(call, own, q, 1) for q in self._others]

    def finish(self) -> None:
        """Wait until the whole result is in place. Call it after `reduce`."""
        self._between.wait(self._call, self._moves)


def fold(call: Description, parts: Sequence[Array], out: Array) -> None:
    """Local. Write the reduction of the parts, in their order, to `out`."""
    _core.reduce([out], list(parts), DTYPES[call.dtype], OPS[call.op])
