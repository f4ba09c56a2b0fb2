"""Messages between the agents of a job that heals: each listens at a port of its own, and calls the others at theirs.

Messages are JSON objects, a line each, and may be lost. Nothing here waits: `distopt.launch.agents.succession`, which
sends them, sends again what has no answer.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..gate import FOR_PEER, Calling, Link
from .node import NO_RANK
from .strangers import AgentGate

_ANSWER_SECONDS = 1.0  # then a connection without an answer is given up for a new one: it may have been cut

Address = tuple[str, int]
Message = dict[str, Any]
Receive = Callable[[Message, str], Message | None]


class Peers(AgentGate):
    """The connections of one agent with the others.

    Args:
        key: of all agents.
        size: number of nodes, the largest of a range.
        selector: waits for the connections.
        receive: gets each message, with the address of its sender's host; returns the answer, or None.
        failed: gets the address of an agent that cannot be called, and the reason.
        warn: prints a line.
    """

    def __init__(
        self,
        key: bytes,
        size: int,
        selector: selectors.BaseSelector,
        receive: Receive,
        failed: Callable[[Address, Exception], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(key, selector, warn)
        self._size, self._receive, self._failed = size, receive, failed
        self._callings: dict[Address, Calling] = {}
        self._next: dict[Address, Message] = {}  # to be sent when the call succeeds
        self._out: dict[Address, _Outgoing] = {}

    def send(self, address: Address, message: Message) -> None:
        """Send a message, or lose it."""
        if (out := self._out.get(address)) is not None and out.is_late():
            out.close()
            del self._out[address]
        if address in self._out:
            self._out[address].send(message)
        else:
            self._next[address] = message
            if address not in self._callings:
                done = partial(self._called, address)
                calling = Calling(address, self._key, FOR_PEER, NO_RANK, self._size, self._selector, done)
                self._callings[address] = calling

    def check_times(self) -> None:
        """Give up what takes too long."""
        self._drop_slow_strangers()
        for calling in list(self._callings.values()):
            calling.check_time()

    def close(self) -> None:
        """Close all connections; idempotent."""
        for calling in self._callings.values():
            calling.close()
        for out in self._out.values():
            out.close()
        self._callings, self._out = {}, {}
        super().close()

    def _called(self, address: Address, result: socket.socket | Exception) -> None:
        self._callings.pop(address, None)
        message = self._next.pop(address)
        if isinstance(result, Exception):
            self._failed(address, result)
        else:
            self._out[address] = out = _Outgoing(result, self._selector, partial(self._answered, address))
            out.send(message)

    def _answered(self, address: Address, message: Message | None) -> None:
        if message is None:
            del self._out[address]
        else:
            self._receive(message, address[0])

    # -- the gate --------------------------------------------------------------------------------------------------
    def _refusal(self, link: Link, size: int) -> str:
        return "" if link.purpose == FOR_PEER else "it has come to the wrong port"

    def _admitted(self, link: Link) -> None:
        link.socket.setblocking(False)

    def _lost(self, link: Link) -> None:
        """It calls again when it has something to say."""

    def _serve(self, link: Link, line: str) -> None:
        try:
            answer = self._receive(json.loads(line), link.address)
            if answer is not None:
                link.socket.sendall(f"{json.dumps(answer)}\n".encode())
        except (ValueError, KeyError, TypeError, OSError):  # of another version, or it reads nothing
            if link.socket.fileno() >= 0:
                self._end_link(link)


class _Outgoing:
    """A connection that this agent has made; `take` gets what comes back, and None at its end."""

    def __init__(
        self, link: socket.socket, selector: selectors.BaseSelector, take: Callable[[Message | None], None]
    ) -> None:
        self._link, self._selector, self._take = link, selector, take
        self._received = b""
        self._unanswered = float("inf")  # since when
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, self._read)

    def is_late(self) -> bool:
        """Whether an answer is overdue."""
        return time.monotonic() > self._unanswered + _ANSWER_SECONDS

    def send(self, message: Message) -> None:
        self._unanswered = min(self._unanswered, time.monotonic())
        try:
            self._link.sendall(f"{json.dumps(message)}\n".encode())
        except OSError:  # it reads nothing, or has ended
            self._end()

    def close(self) -> None:
        if self._link.fileno() >= 0:
            self._selector.unregister(self._link)
            self._link.close()

    def _end(self) -> None:
        self.close()
        self._take(None)

    def _read(self) -> None:
        try:
            part = self._link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        *lines, self._received = (self._received + part).split(b"\n")
        try:
            for line in lines:
                self._unanswered = float("inf")
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError):  # of another version
            part = b""
        if not part and self._link.fileno() >= 0:
            self._end()
