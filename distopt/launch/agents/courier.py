"""Own states of the ranks of a node travel to the agent of the next node, in case that this node is lost.

No rank takes part in it. A rank tells its agent that a slot has new states (`distopt.launch.heal.state_slots`). The
agent sends what has been written last, so a link that is too slow skips steps. Small states go between the parts of
large ones. The connection begins as all connections of a job do (`distopt.launch.gate`); then follow frames.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ... import _core
from ..gate import FOR_STATES, Calling, Gate, Link
from ..heal.state_slots import POST, SENT, TO_SEND, VALID, Place

# The slot, the word that names its states (0 if they have changed meanwhile), the bytes of all, where the part begins,
# and the bytes of that.
_FRAME = struct.Struct("<IQQQQ")
_PART_BYTES = 1 << 17  # most bytes of a part


class _Sending(NamedTuple):
    """States of a slot that are being sent: the slot's number, the word that names them, and how many bytes."""

    slot: int
    valid: int
    n_bytes: int


class Sender:
    """Sends the own states of the ranks of this agent.

    Args:
        places: of the agent's ranks.
        selector: waits until the connection takes more.
    """

    def __init__(self, places: Sequence[Place], selector: selectors.BaseSelector) -> None:
        small = [slot for place in places for slot in place.records]
        self._slots = small + [slot for place in places for slot in place.copies]
        self._n_small = len(small)
        self._selector = selector
        self._link: socket.socket | None = None
        self._calling: Calling | None = None
        self._rest = memoryview(b"")  # of the frame
        self._large: tuple[_Sending, int] | None = None  # and how many of its bytes have been sent
        self._pending: set[int] = set()

    def connect(self, address: tuple[str, int], key: bytes, number: int, size: int) -> None:
        """Connect to the next node; until then, and if that fails, nothing is sent."""
        self.close()
        self._calling = Calling(address, key, FOR_STATES, number, size, self._selector, self._connected)

    def _connected(self, result: socket.socket | Exception) -> None:
        self._calling = None
        if isinstance(result, socket.socket):
            self._link = result
            result.setblocking(False)
            self._selector.register(result, selectors.EVENT_READ, self._hear)
            self._look((TO_SEND, SENT))
            self._send()

    def check_time(self) -> None:
        """Give up a connection that takes too long."""
        if self._calling is not None:
            self._calling.check_time()

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._calling is not None:
            self._calling.close()
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
        self._link = self._calling = self._large = None
        self._rest = memoryview(b"")

    def look(self) -> None:
        """Look for states that are to be sent."""
        self._look((TO_SEND,))
        if self._pending and self._link is not None:
            self._send()

    def _look(self, posts: Sequence[int]) -> None:
        self._pending.update(i for i, slot in enumerate(self._slots) if slot.is_valid and slot.words[POST] in posts)

    def _hear(self) -> None:
        """The next node has answered, ended, or takes more."""
        link = self._link
        assert link is not None
        try:
            if not link.recv(1):
                raise ConnectionResetError("the other end closed the connection")
        except BlockingIOError:
            self._send()
        except OSError:
            self.close()

    def _send(self) -> None:
        """Send as much as the connection takes now."""
        link = self._link
        assert link is not None
        try:
            while self._rest or self._next_part():
                self._rest = self._rest[link.send(self._rest) :]
            self._selector.modify(link, selectors.EVENT_READ, self._hear)
        except BlockingIOError:
            self._selector.modify(link, selectors.EVENT_READ | selectors.EVENT_WRITE, self._hear)
        except OSError:
            self.close()

    def _next_part(self) -> bool:
        """Make the next frame, if there is one."""
        small = [slot for slot in self._pending if slot < self._n_small]
        if small or (self._large is None and self._pending):
            slot = min(small or self._pending)
            self._pending.remove(slot)
            if (sending := self._begin(slot)) is None:
                return self._next_part()
            if slot >= self._n_small:
                self._large = sending, 0
            else:
                self._frame(sending, 0, sending.n_bytes)
                return True
        if self._large is None:
            return False
        sending, at = self._large
        end = min(sending.n_bytes, at + _PART_BYTES)
        self._large = (sending, end) if end < sending.n_bytes else None
        self._frame(sending, at, end)
        return True

    def _begin(self, slot: int) -> _Sending | None:
        files = self._slots[slot]
        valid = files.words[VALID]  # once: it may change
        _core.fence()
        return _Sending(slot, valid, os.fstat(files.own).st_size) if valid else None

    def _frame(self, sending: _Sending, begin: int, end: int) -> None:
        files = self._slots[sending.slot]
        part = os.pread(files.own, end - begin, begin).ljust(end - begin, b"\0")  # the file may be shorter by now
        _core.fence()  # the states, then the word again, as in a sequence lock
        valid = sending.valid if files.words[VALID] == sending.valid else 0
        self._rest = memoryview(_FRAME.pack(sending.slot, valid, sending.n_bytes, begin, end - begin) + part)
        if end == sending.n_bytes and valid:
            files.words[POST] = SENT


@dataclass
class _Receiving:
    """The parts of a slot's states that have come."""

    content: bytearray
    is_valid: bool = True


class Receiver(Gate):
    """Takes the own states of the ranks of the node before, and keeps the newest of each of their slots.

    Args:
        key: of all nodes.
        selector: waits for the connections.
        listener: takes them.
        arrivals: for each slot, the word that names the states which have come last.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self, key: bytes, selector: selectors.BaseSelector, listener: socket.socket, arrivals: memoryview[int]
    ) -> None:
        super().__init__(key, selector)
        self._arrivals = arrivals
        self.port = int(listener.getsockname()[1])
        self._parts: dict[tuple[int, int], _Receiving] = {}  # by node and slot
        self._whole: dict[tuple[int, int], bytes] = {}
        self.listen(listener)

    @property
    def states(self) -> Iterable[bytes]:
        """The own states of ranks of other nodes."""
        return self._whole.values()

    def check_times(self) -> None:
        """Act on timeouts."""
        self._drop_slow_strangers()

    def _refusal(self, link: Link, size: int) -> str:
        return "" if link.purpose == FOR_STATES else "it is no agent that sends states"

    def _admitted(self, link: Link) -> None:
        """Do nothing: the agent sends frames."""

    def _lost(self, link: Link) -> None:
        for key in [key for key in self._parts if key[0] == link.rank]:
            del self._parts[key]

    def _take(self, link: Link) -> None:
        while len(link.received) >= _FRAME.size:
            slot, valid, n_bytes, begin, length = _FRAME.unpack_from(link.received)
            if len(link.received) < _FRAME.size + length:
                return
            key = link.rank, slot
            part = memoryview(link.received)[_FRAME.size : _FRAME.size + length]
            if begin == 0:
                self._parts[key] = _Receiving(bytearray(n_bytes))
            if (states := self._parts.get(key)) is not None:
                states.content[begin : begin + length] = part
                states.is_valid &= valid != 0
                if begin + length == n_bytes:
                    del self._parts[key]
                    if states.is_valid:
                        self._whole[key] = bytes(states.content)
                        if slot < len(self._arrivals):
                            self._arrivals[slot] = valid
            part.release()
            del link.received[: _FRAME.size + length]
