"""Membership in a job: one proof, for the Unix sockets of a host and for TCP between hosts.

One side listens (`Gate`), the others connect (`introduce`). Each proves by HMAC that it knows the job's key, and sends
nothing from which the key could be learned. On a Unix socket the kernel also gives the user and the process at the
other end. After that, the two exchange any data; a `Gate` reads lines.

This module needs little of the standard library, so that a server can start at once.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from functools import partial

from .sockets import keep_alive, peer_of, receive_exactly
from .stopwatch import Deadline, Stopwatch

CONNECT_SECONDS = 2.0  # then a connection attempt, or a message on a connection, gives up
# A connected process has this time to prove that it belongs to the job: three messages on a slow line.
_HANDSHAKE_SECONDS = 5.0
LONGEST_CALL_SECONDS = CONNECT_SECONDS + 0.3  # the longest time of a connection attempt

# The purposes of a connection: to report to the owner of an endpoint, to share memory with ranks of the host, to
# exchange values, to find or elect an owner, to end together with other ranks, to take part in averages, and to copy
# states.
FOR_AGENT, FOR_HOST_GROUP, FOR_KEYS, FOR_PEER, FOR_LIFELINE = b"a", b"h", b"k", b"p", b"w"
FOR_MEMBERS, FOR_STATES = b"m", b"s"

_NONCE_BYTES = _PROOF_BYTES = 32
# Nonce, purpose, rank, number of ranks, host, process id, proof of the key.
_HELLO = struct.Struct(f"!{_NONCE_BYTES}scII64sI{_PROOF_BYTES}s")
_REASON = struct.Struct("!H")  # after the proof: the length of the reason for a refusal, or 0

_MAX_STRANGERS = 64
_MAX_LINE_BYTES = 1 << 16


class RefusedError(Exception):
    """The gate refuses a process of the job; the text is its reason."""


class StrangerError(ConnectionError):
    """The other end of a connection does not prove that it belongs to the job, or does not believe this one."""


class SilentError(TimeoutError):
    """Something listens at an address, and does not answer in time."""


def call(
    address: tuple[str, int],
    key: bytes,
    purpose: bytes,
    rank: int,
    size: int,
    clock: Stopwatch,
    seconds: float = CONNECT_SECONDS,
) -> socket.socket:
    """Connect to the `Gate` at a TCP address, and introduce this process; see `introduce`.

    `clock`, a stopwatch of `LONGEST_CALL_SECONDS`, is looked at in between. The connection may take `seconds`.

    Raises:
        RefusedError: the gate does not let this process in.
        StrangerError: the listener there is not of this job, or not a gate.
        SilentError: the listener there does not answer in time.
        OSError: nothing listens there.
    """
    clock.seconds()
    link = socket.create_connection(address, timeout=seconds)
    try:
        keep_alive(link)
        introduce(link, key, purpose, rank, size, Deadline(_HANDSHAKE_SECONDS, clock))
    except BaseException as error:
        link.close()
        if isinstance(error, TimeoutError):
            raise SilentError("something listens there, but does not answer") from None
        if isinstance(error, OSError) and not isinstance(error, StrangerError):
            raise StrangerError(f"no answer ({error})") from None
        raise
    link.settimeout(CONNECT_SECONDS)
    return link


def introduce(link: socket.socket, key: bytes, purpose: bytes, rank: int, size: int, deadline: Deadline) -> None:
    """Prove to the `Gate` at the other end that this process knows the key, and make it prove the same.

    Args:
        link: the connection.
        key: of the job's processes.
        purpose: of the connection, one of those above.
        rank: its number.
        size: how many ranks or nodes it expects.
        deadline: for all of it.

    Raises:
        RefusedError: the gate does not let this process in.
        StrangerError: the other end does not know the key.
        OSError: it hung up, as it does if it does not believe this process, or did not answer in time.
    """
    talk = introduction(key, purpose, rank, size)
    with contextlib.suppress(StopIteration):
        said, count = next(talk)
        while True:
            if said:
                link.sendall(said)
            said, count = talk.send(receive_exactly(link, count, deadline))


def introduction(key: bytes, purpose: bytes, rank: int, size: int) -> Generator[tuple[bytes, int], bytes, None]:
    """The handshake of `introduce` without a socket: yields the bytes to send, and the number to receive after them.

    Raises:
        RefusedError, StrangerError: see `introduce`.
    """
    theirs = yield b"", _NONCE_BYTES
    own = os.urandom(_NONCE_BYTES)
    host = socket.gethostname().encode()[:64]
    said = _HELLO.pack(own, purpose, rank, size, host, os.getpid(), b"")[:-_PROOF_BYTES]
    answer = yield said + proof(key, b"join", theirs, said), _PROOF_BYTES
    if not hmac.compare_digest(answer, proof(key, b"accept", own, theirs)):
        raise StrangerError("not of this job")
    (length,) = _REASON.unpack((yield b"", _REASON.size))
    if length:
        raise RefusedError((yield b"", length).decode(errors="replace"))


class Calling:
    """As `call`, without waiting: handlers of the selector do it, and `done` gets the connection or the reason.

    Args:
        address: host and port.
        key: of the job's processes.
        purpose: of the connection.
        rank: number of this process.
        size: how many it expects.
        selector: waits for the other end.
        done: called once, not before this returns: with the connection, or with what `call` would raise; without an
            answer, after `LONGEST_CALL_SECONDS`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        purpose: bytes,
        rank: int,
        size: int,
        selector: selectors.BaseSelector,
        done: Callable[[socket.socket | Exception], None],
    ) -> None:
        self._talk = introduction(key, purpose, rank, size)
        self._selector, self._done = selector, done
        self._link: socket.socket | None = None
        self._received = bytearray()
        self._count = 0  # bytes wanted; 0 until it is connected
        self._end = time.monotonic() + LONGEST_CALL_SECONDS
        self._fact: Exception = SilentError("no answer")
        try:
            self._places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except OSError as error:
            self._places, self._fact = [], error
        self._next_place()

    def check_time(self) -> None:
        """Give up if it has taken too long. Also reports what has failed at once."""
        if self._link is None:
            self._finish(self._fact)
        elif time.monotonic() > self._end:
            self._finish(SilentError("no answer") if self._count else TimeoutError(errno.ETIMEDOUT, "no answer"))

    def close(self) -> None:
        """Give up without a word; idempotent."""
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _next_place(self) -> None:
        self.close()
        while self._places and self._link is None:
            family, kind, protocol, _, place = self._places.pop(0)
            link = socket.socket(family, kind, protocol)
            link.setblocking(False)
            code = link.connect_ex(place)
            if code in (0, errno.EINPROGRESS):
                self._link = link
                self._selector.register(link, selectors.EVENT_WRITE, self._connected)
            else:
                self._fact = OSError(code, os.strerror(code))
                link.close()

    def _connected(self) -> None:
        link = self._link
        assert link is not None
        if code := link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._fact = OSError(code, os.strerror(code))
            self._next_place()
            if self._link is None:
                self._finish(self._fact)
            return
        keep_alive(link)
        _, self._count = next(self._talk)
        self._selector.modify(link, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        link = self._link
        assert link is not None
        try:
            part = link.recv(self._count - len(self._received))
            if not part:
                raise StrangerError("it hung up")
            self._received += part
            if len(self._received) == self._count:
                said, self._count = self._talk.send(bytes(self._received))
                self._received.clear()
                link.sendall(said)
        except BlockingIOError:
            pass
        except StopIteration:
            self._selector.unregister(link)
            self._link = None
            link.settimeout(CONNECT_SECONDS)
            self._finish(link)
        except (RefusedError, OSError) as error:
            self._finish(error)

    def _finish(self, result: socket.socket | Exception) -> None:
        self.close()
        self._done(result)


def proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """A proof that its sender holds the key. The role keeps one side's proof from serving as the other's."""
    return hmac.digest(key, role + b"".join(parts), "sha256")


class Link:
    """One connection. Its rank is -1 until the other side has proved that it knows the key."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.address = address  # an IPv4 address without the prefix that makes it one of IPv6
        self.nonce = os.urandom(_NONCE_BYTES)
        self.handshake = Deadline(_HANDSHAKE_SECONDS)
        self.received = bytearray()
        self.rank, self.purpose = -1, b""
        self.host, self.pid = "", 0
        self.unreachable = False  # the connection was lost, and the other side has not ended it


class Gate:
    """Admits peers that prove to know a key, and reads their lines.

    Args:
        key: the key.
        selector: waits for the connections; each is registered with a function for `handle_events` to call.

    Attributes:
        most_strangers: how many connections may not have proved anything yet; another one ends the oldest of them.
    """

    most_strangers = _MAX_STRANGERS

    def __init__(self, key: bytes, selector: selectors.BaseSelector) -> None:
        self._key = key
        self._selector = selector
        self._listeners: list[socket.socket] = []
        self._links: dict[Link, None] = {}
        self._strangers: dict[Link, None] = {}  # those of them that have not been admitted

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from this listening socket, too, and own it."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def close(self) -> None:
        """Close all listeners and connections; idempotent."""
        for link in list(self._links):
            self._drop(link)
        self.stop_listening()

    def stop_listening(self) -> None:
        """Accept no more connections, and close those that have proved nothing; idempotent."""
        for link in list(self._strangers):
            self._drop(link)
        listeners, self._listeners = self._listeners, []  # first: another thread may be closing, too
        for listener in listeners:
            self._selector.unregister(listener)
            listener.close()

    # For subclasses.
    def _refusal(self, link: Link, size: int) -> str:
        """Why a peer that knows the key, and expects `size` ranks or nodes, is not admitted; empty if it is."""
        raise NotImplementedError

    def _admitted(self, link: Link) -> None:
        """Act on a peer that has been admitted."""
        raise NotImplementedError

    def _lost(self, link: Link) -> None:
        """Act on the end of an admitted peer's connection, from the other side."""
        raise NotImplementedError

    def _serve(self, link: Link, line: str) -> None:
        """Act on a line from an admitted peer."""
        raise NotImplementedError

    def _turned_away(self, link: Link) -> None:
        """Act on a peer that does not know the key."""

    def _out_of_files(self) -> None:
        """Act on a peer that cannot be let in, because this process may open no more files."""

    def _drop_slow_strangers(self) -> None:
        for link in list(self._strangers):
            if link.handshake.over:
                self._drop(link)

    def _accept(self, listener: socket.socket) -> None:
        if listener.fileno() < 0:
            return
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._out_of_files()
            return  # else the other end has closed it
        of_this_host = connection.family == socket.AF_UNIX
        if of_this_host and peer_of(connection)[1] != os.geteuid():
            connection.close()
            return
        link = Link(connection, "" if of_this_host else address[0].removeprefix("::ffff:"))
        if len(self._strangers) >= self.most_strangers:
            self._turn_away(next(iter(self._strangers)))
        self._links[link] = self._strangers[link] = None
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, link))
        try:
            connection.settimeout(CONNECT_SECONDS)
            if not of_this_host:
                keep_alive(connection)
            connection.sendall(link.nonce)
        except OSError:
            self._drop(link)

    def _read(self, link: Link) -> None:
        part = b""
        try:
            part = link.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            link.unreachable = not isinstance(error, ConnectionError)
        link.received += part
        if link.rank < 0:
            if not part and link.received:
                self._turn_away(link)
            elif not part:  # it gave up, on a slow line, for example
                self._drop(link)
            elif len(link.received) >= _HELLO.size:
                self._admit(link)
            return
        self._take(link)
        if link.socket.fileno() >= 0 and not part:
            self._end_link(link)

    def _take(self, link: Link) -> None:
        """Act on the lines that an admitted peer has sent."""
        while link.socket.fileno() >= 0 and (end := link.received.find(b"\n")) >= 0:
            line = link.received[:end].decode("utf-8", "replace")
            del link.received[: end + 1]
            self._serve(link, line)
        if link.socket.fileno() >= 0 and len(link.received) > _MAX_LINE_BYTES:
            self._end_link(link)

    def _end_link(self, link: Link) -> None:
        """Drop the connection of an admitted peer, and act on its end."""
        self._drop(link)
        self._lost(link)

    def _drop(self, link: Link) -> None:
        self._strangers.pop(link, None)
        if self._links.pop(link, link) is None:
            self._selector.unregister(link.socket)
        link.socket.close()

    def _turn_away(self, link: Link) -> None:
        self._turned_away(link)
        self._drop(link)

    def _admit(self, link: Link) -> None:
        said = bytes(link.received[: _HELLO.size])
        theirs, purpose, rank, size, host, pid, proved = _HELLO.unpack(said)
        expected = proof(self._key, b"join", link.nonce, said[:-_PROOF_BYTES])
        if not hmac.compare_digest(proved, expected) or len(link.received) != _HELLO.size:
            self._turn_away(link)
            return
        link.received.clear()
        link.purpose, link.host, link.pid = purpose, host.rstrip(bytes(1)).decode("utf-8", "replace"), pid
        if link.socket.family == socket.AF_UNIX:
            link.pid, _ = peer_of(link.socket)
        link.rank = rank
        del self._strangers[link]
        reason = self._refusal(link, size)
        text = reason.encode()
        try:
            link.socket.sendall(proof(self._key, b"accept", theirs, link.nonce) + _REASON.pack(len(text)) + text)
        except OSError:
            reason = "it has hung up"
        if reason:
            self._drop(link)
        else:
            self._admitted(link)
