"""How the ranks of one host meet: rank 0 listens, the others come."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ...errors import LaunchError
from ..messages import Deadline, rank_named, receive, receive_exactly, try_to_tell

if TYPE_CHECKING:
    from ..watch.siblings import Absence

__all__ = ["GRACE_SECONDS", "Listener", "join"]

_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = struct.Struct(f"!{_NONCE_BYTES}sII{_MAC_BYTES}s")  # nonce, rank, world size, proof
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_HANDSHAKE_SECONDS = 2.0  # for which a process may be connected without having proved that it belongs to the job
# Joining ranks wait this much longer than rank 0, which can report who is missing.
GRACE_SECONDS = 5.0

# Interval at which rank 0 checks for ranks that have not joined.
_LOOK_SECONDS = 0.1

_Peers: TypeAlias = "dict[int, tuple[socket.socket, int]]"  # rank: connection, pid


def _address(ticket: bytes) -> str:
    return "\0distopt-" + hashlib.sha256(b"distopt address " + ticket).hexdigest()[:32]


def _proof(ticket: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(ticket, role + b"".join(parts), "sha256")


def _claim(rank: int, size: int) -> bytes:
    return struct.pack("!II", rank, size)


def _peer_of(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as reported by the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def join(ticket: bytes, rank: int, size: int, timeout: float, absence: Absence) -> tuple[socket.socket, bytes]:
    """The connection to rank 0, and its answer after all ranks have joined."""
    deadline = Deadline(timeout)
    while True:
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            # Suppressed: rank 0 is not listening yet, its queue is full, or it gave up.
            with contextlib.suppress(ConnectionError, BlockingIOError):
                try:
                    link.settimeout(deadline.left())
                    link.connect(_address(ticket))
                    accepted = _prove(link, ticket, rank, size, deadline)
                except TimeoutError:
                    raise LaunchError(
                        f"rank {rank} found no rank 0 on this host within {timeout:g} s; check that rank 0 runs here, "
                        "in the same network namespace and with the same ticket"
                    ) from None
                with rank_named(0):
                    answer = receive(link, accepted)
                stack.pop_all()
                return link, answer
        # More patient than rank 0, which can report who is missing.
        absence.check(f"rank {rank} found no rank 0 on this host", size - 1, patience=1.5)
        time.sleep(0.01)


def _prove(link: socket.socket, ticket: bytes, rank: int, size: int, deadline: Deadline) -> Deadline:
    if _peer_of(link)[1] != os.geteuid():
        raise LaunchError("the process that listens for this job belongs to another user; use a fresh ticket")
    theirs = receive_exactly(link, _NONCE_BYTES, deadline)
    own = os.urandom(_NONCE_BYTES)
    claim = _claim(rank, size)
    link.sendall(_HELLO.pack(own, rank, size, _proof(ticket, b"join", theirs, own, claim)))
    answer = receive_exactly(link, _MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(ticket, b"accept", theirs, own, claim)):
        raise LaunchError("the process that listens for this job does not hold its ticket; use a fresh ticket")
    return Deadline(deadline.left() + GRACE_SECONDS)


@dataclass(eq=False)
class _Stranger:
    """A process that has connected and still has to prove that it belongs to the job."""

    link: socket.socket
    pid: int
    nonce: bytes
    said: bytearray = field(default_factory=bytearray)
    deadline: Deadline = field(default_factory=lambda: Deadline(_HANDSHAKE_SECONDS))


class Listener:
    """The listening side of rank 0 while the others join. Processes that connect are heard side by side."""

    def __init__(self, ticket: bytes, size: int, timeout: float, absence: Absence) -> None:
        self._ticket = ticket
        self._size = size
        self._deadline = Deadline(timeout)
        self._absence = absence
        self._peers: _Peers = {}
        self._strangers: set[_Stranger] = set()

    def gather(self) -> _Peers:
        """Local. The connections and process ids of all other ranks.

        Raises:
            LaunchError: a rank is missing or has ended, or two have one number or expect different sizes.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, selectors.DefaultSelector() as selector:
            try:
                listener.bind(_address(self._ticket))
                listener.listen(self._size)
                selector.register(listener, selectors.EVENT_READ, None)
                while len(self._peers) < self._size - 1:
                    self._step(listener, selector)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise self._failure(
                        f"{self._absent()} within {self._deadline.seconds:g} s; see the output of those processes"
                    ) from None
                raise self._failure(
                    f"rank 0 cannot listen for the other ranks ({error}); "
                    "is there a second rank 0, or another job with this ticket?"
                ) from None
            except LaunchError as error:
                raise self._failure(str(error)) from None
            except BaseException:
                self._failure("rank 0 was interrupted while the ranks were joining")
                raise
            finally:
                for stranger in self._strangers:
                    stranger.link.close()
        return self._peers

    def _step(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        ready = selector.select(min(_LOOK_SECONDS, self._deadline.left()))
        if not ready:
            present = {pid for _, pid in self._peers.values()}
            self._absence.check(self._absent(), self._size - 1 - len(present), present=present)
        for key, _ in ready:
            if key.data is None:
                self._greet(listener, selector)
            elif isinstance(key.data, _Stranger):
                self._hear(key.data, selector)
            else:  # a rank that has joined sends nothing until all have joined
                rank = key.data
                raise self._failure(
                    f"rank {rank} (pid {self._peers[rank][1]}) ended while the ranks were joining; see its output"
                )
        for stranger in [stranger for stranger in self._strangers if stranger.deadline.over]:
            self._dismiss(stranger, selector)

    def _greet(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        """Let a process connect, and ask it for its proof."""
        link, _ = listener.accept()
        try:
            pid, uid = _peer_of(link)
            if uid != os.geteuid():
                raise PermissionError
            link.setblocking(False)
            nonce = os.urandom(_NONCE_BYTES)
            link.sendall(nonce)  # a new connection has room for it
        except OSError:
            link.close()
            return
        stranger = _Stranger(link, pid, nonce)
        self._strangers.add(stranger)
        selector.register(link, selectors.EVENT_READ, stranger)

    def _hear(self, stranger: _Stranger, selector: selectors.BaseSelector) -> None:
        """Take what a process says, and admit it once that is a whole proof."""
        try:
            part = stranger.link.recv(_HELLO.size - len(stranger.said))
            stranger.said += part
            if not part:
                raise ConnectionResetError
            if len(stranger.said) < _HELLO.size:
                return
            rank = self._admit(stranger)
        except OSError:  # not a rank of this job, or one that has ended, which is then reported as missing
            self._dismiss(stranger, selector)
            return
        self._strangers.remove(stranger)
        selector.modify(stranger.link, selectors.EVENT_READ, rank)

    def _dismiss(self, stranger: _Stranger, selector: selectors.BaseSelector) -> None:
        self._strangers.remove(stranger)
        selector.unregister(stranger.link)
        stranger.link.close()

    def _admit(self, stranger: _Stranger) -> int:
        link, pid = stranger.link, stranger.pid
        theirs, rank, size, proof = _HELLO.unpack(stranger.said)
        claim = _claim(rank, size)
        if not hmac.compare_digest(proof, _proof(self._ticket, b"join", stranger.nonce, theirs, claim)):
            raise PermissionError
        link.sendall(_proof(self._ticket, b"accept", stranger.nonce, theirs, claim))
        fact = None
        if size != self._size:
            fact = f"rank {rank} (pid {pid}) expects {size} ranks on this host, rank 0 expects {self._size}"
        elif not 0 < rank < size:
            fact = f"a process (pid {pid}) joined as rank {rank} of {size}"
        elif rank in self._peers:
            fact = f"two processes (pids {self._peers[rank][1]} and {pid}) are rank {rank}"
        if fact:
            fact += "; number the processes 0, 1, ... and give all of them the same world size"
            try_to_tell(link, fact)
            raise self._failure(fact)
        self._peers[rank] = (link, pid)
        return int(rank)

    def _absent(self) -> str:
        absent = [str(q) for q in range(1, self._size) if q not in self._peers]
        noun = "ranks" if len(absent) > 1 else "rank"
        return f"{noun} {', '.join(absent)} of {self._size} did not join rank 0 on this host"

    def _failure(self, text: str) -> LaunchError:
        """Send the failure to all ranks that have joined, and return it."""
        for link, _ in self._peers.values():
            try_to_tell(link, text)
            link.close()
        return LaunchError(text)
