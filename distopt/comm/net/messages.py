"""Messages between two ranks, apart from the collectives and from their order.

A header goes before the data, because a transport's tags are narrow, and it does not compare types. A message that
arrives before its receive has begun is put aside, to delay no other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from ... import _core
from ..base import DTYPES, Array, storage_of
from ..work import MessageWork
from .waits import Waits

_HEADER, _DATA = 0, 1  # the transport's tags
_MOST_BYTES = 1 << 30  # of one message of a transport: MPI's counts are ints
_ANYONE = -1
_NAMES = list(DTYPES)


class NetMessage(MessageWork):
    """A message under way.

    Attributes:
        sends: whether this rank sends it.
        peer: rank at the other end; -1: any, until the message has begun to arrive.
        header: tag, code of the type, elements.
        data: its bytes, the caller's memory.
        transfers: its parts, once the message has begun to move.
        early: the message that it takes over, if this arrived, in part or whole, before its receive.
    """

    def __init__(self, messages: NetMessages, sends: bool, peer: int, header: Array, data: Array) -> None:
        self.sends = sends
        self.peer = peer
        self.header = header
        self.data = data
        self.transfers: list[_core.Transfer] | None = None
        self.early: NetMessage | None = None
        self._messages = messages

    @property
    def source(self) -> int:
        """Local. The rank that has sent the message; -1 before it has come."""
        return self.peer if self.done() else -1

    @property
    def what(self) -> str:
        """Local. Its count and type, as text."""
        return f"{self.header[2]:,} {_NAMES[self.header[1]]}"

    def done(self) -> bool:
        """Local. Move messages and collectives forward without waiting; return whether this one has ended."""
        if self.ended() or self.moved():
            return True
        self._messages.waits.answer()
        return False

    def moved(self) -> bool:
        """Local. Move everything forward; return whether this message has ended."""
        self._messages.progress()
        return self.ended()

    def ended(self) -> bool:
        """Local. Whether it has ended, as far as is known."""
        if self.early is not None and self.early.ended():
            self.data[:], self.transfers, self.early = self.early.data, [], None
        return self.transfers is not None and all(transfer.done for transfer in self.transfers)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds; see `Work.wait`."""
        if not self.ended():
            self._messages.waits.wait_for_message(self, timeout)

    def waiting(self) -> str:
        """Local. A wait for it, in words."""
        waits = self._messages.waits
        peer = "any rank" if self.peer == _ANYONE else waits.processes[self.peer].name
        verb, word = ("send", "to") if self.sends else ("receive", "from")
        return f"{waits.me.name} waits to {verb} {self.what} with tag {self.header[0]} {word} {peer}"


class NetMessages:
    """The messages of one rank, for any thread.

    Args:
        transport: carries nothing else.
        waits: of its rank; a wait for a message also moves the collectives of their communicator.
    """

    def __init__(self, transport: _core.Transport, waits: Waits) -> None:
        self._channel = _core.NetChannel(transport)
        self.waits = waits
        self._awaiting: list[NetMessage] = []
        self._aside: list[NetMessage] = []  # has arrived, or arrives, before its receive
        self._moving: list[NetMessage] = []  # keeps them and their arrays alive
        self._has_refused = False
        self._lock = threading.RLock()

    def make(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> NetMessage:
        """Local. A message to `start`; see `Communicator.send`."""
        header = np.array([tag, DTYPES[dtype], array.size], np.int64)
        return NetMessage(self, sends, peer, header, array.reshape(-1).view(np.uint8))

    def start(self, message: NetMessage) -> None:
        """Local. Begin to send or to receive it."""
        with self._lock:
            if message.sends:
                peer, data = message.peer, _parts(message.data)
                message.transfers = [self._channel.send(message.header, peer, _HEADER)]
                message.transfers += [self._channel.send(part, peer, _DATA) for part in data]
                self._moving.append(message)
            else:
                self._await(message)
        self.advance()

    def advance(self) -> None:
        """Local. Move messages forward without waiting.

        After a message was refused, none moves: the next receive from its sender would get its data.
        """
        if self._has_refused or not self._lock.acquire(blocking=False):  # another thread does it
            return
        try:
            self._channel.poll()
            while (source := self._channel.probe(_HEADER)) >= 0:
                header = np.empty(3, np.int64)
                arrives = self._channel.receive(header, source, _HEADER)
                while not arrives.done:
                    self._channel.poll()
                self._take(source, header)
            self._moving = [message for message in self._moving if not message.ended()]
            for early in self._aside:
                early.ended()
        finally:
            self._lock.release()

    def progress(self) -> None:
        """Local. Move messages and collectives forward without waiting."""
        self.waits.core.assist()
        if self.under_way:
            self.advance()

    @property
    def under_way(self) -> bool:
        """Local. Whether any message has not ended."""
        return bool(self._awaiting or self._moving or self._aside)

    def _await(self, message: NetMessage) -> None:
        for early in self._aside:
            if self._fits(message, early.peer, early.header):
                self._aside.remove(early)
                message.peer, message.early = early.peer, early
                self._moving.append(message)
                return
        self._awaiting.append(message)

    def _take(self, source: int, header: Array) -> None:
        """Receive a message whose header has arrived."""
        message = next((m for m in self._awaiting if self._fits(m, source, header)), None)
        if message is None:
            data = np.empty(header[2] * storage_of(_NAMES[header[1]]).itemsize, np.uint8)
            message = NetMessage(self, False, source, header, data)
            self._aside.append(message)
        else:
            self._awaiting.remove(message)
            self._moving.append(message)
        message.peer = source
        message.transfers = [self._channel.receive(part, source, _DATA) for part in _parts(message.data)]

    def _fits(self, message: NetMessage, source: int, header: Array) -> bool:
        """Whether `message` awaits the one with this header. If type or length differ, the communicator fails."""
        if message.header[0] != header[0] or message.peer not in (source, _ANYONE):
            return False
        if not np.array_equal(message.header, header):
            self._has_refused = True
            sender, me = self.waits.processes[source], self.waits.me
            self.waits.core.fail(
                "MismatchError",
                f"{sender.name} sent {header[2]:,} {_NAMES[header[1]]} with tag {header[0]}, where {me.name} receives "
                f"{message.what}",
                "both sides of a message must agree on type and count",
                [sender, me],
            )
        return True


def _parts(data: Array) -> Iterator[Array]:
    return (data[begin : begin + _MOST_BYTES] for begin in range(0, data.size, _MOST_BYTES))
