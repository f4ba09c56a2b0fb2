"""The ranks of one host find each other and exchange a few bytes.

Rank 0 listens on an abstract Unix socket whose name is a hash of the job's ticket, and the others connect. Abstract
names vanish with their process, so nothing is left behind. They are public, so the name must not reveal the ticket.
Both sides prove by HMAC that they know it, and the kernel reports the user and process at the other end.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, TypeAlias

from ..errors import LaunchError
from .siblings import Absence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["HostGroup", "pack", "unpack"]

_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = struct.Struct(f"!{_NONCE_BYTES}sII{_MAC_BYTES}s")  # nonce, rank, world size, proof
_HEADER = struct.Struct("!BI")  # kind, length
_DATA, _ERROR = 0, 1
_MAX_BYTES = 16 << 20
_FD = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# A foreign process that connects and sends nothing must not delay the ranks behind it.
_HANDSHAKE_SECONDS = 2.0
# Joining ranks wait this much longer than rank 0, which can report who is missing.
_GRACE_SECONDS = 5.0

# Interval at which rank 0 checks for ranks that have not joined.
_LOOK_SECONDS = 0.1

_Peers: TypeAlias = "dict[int, tuple[socket.socket, int]]"  # rank: connection, pid


class HostGroup:
    """The ranks of one host, connected through rank 0.

    Args:
        ticket: 16 secret bytes that the launcher gave to every rank.
        rank: number of this process on its host.
        size: number of processes on the host.
        timeout: seconds to wait for the others to join, and in each later exchange.
        absence: handles ranks that do not join.

    Raises:
        LaunchError: a rank is missing or duplicated, has another world size, or does not know the ticket.
    """

    def __init__(self, ticket: bytes, rank: int, size: int, timeout: float, absence: Absence | None = None) -> None:
        if len(ticket) != 16:
            raise LaunchError(f"a ticket has 16 bytes, not {len(ticket)}; pass the launcher's as it is")
        if not 0 <= rank < size:
            raise LaunchError(f"rank {rank} is outside 0 ... {size - 1}; check the variables that the launcher set")
        self.rank = rank
        self.size = size
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._timeout = timeout
        self._links: dict[int, socket.socket] = {}  # rank 0: every other rank; the others: rank 0
        if size == 1:
            return
        absence = absence or Absence()
        if rank == 0:
            peers = _Listener(ticket, size, timeout, absence).gather()
            self._links = {q: link for q, (link, _) in peers.items()}
            self.pids = (os.getpid(), *(pid for _, (_, pid) in sorted(peers.items())))
            with self._telling():
                self._send_all(struct.pack(f"!{size}i", *self.pids))
        else:
            link, answer = _join(ticket, rank, size, timeout, absence)
            self._links = {0: link}
            self.pids = struct.unpack(f"!{size}i", answer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ.

        Raises:
            LaunchError: a rank ended or did not take part in time.
        """
        if self.size == 1:
            return [payload]
        deadline = _Deadline(self._timeout)
        if self.rank != 0:
            link = self._links[0]
            with _rank_named(0):
                with contextlib.suppress(ConnectionError):  # if rank 0 has failed, its reason can still be read
                    _send(link, payload, deadline)
                return unpack(_receive(link, _Deadline(self._timeout + _GRACE_SECONDS)), self.size)
        payloads = [payload]
        with self._telling():
            for q, link in sorted(self._links.items()):
                with _rank_named(q, self.pids[q]):
                    payloads.append(_receive(link, deadline))
            self._send_all(pack(payloads))
        return payloads

    def share_fd(self, make: Callable[[], int]) -> int:
        """Collective. Rank 0 makes a file descriptor; each rank returns its own descriptor of the same file.

        Raises:
            LaunchError: rank 0 failed or ended.
        """
        if self.rank == 0:
            with self._telling("rank 0 could not make the shared file: "):
                fd = make()
            try:
                with self._telling():
                    self._send_all(b"a descriptor follows")
                    for q, link in self._links.items():
                        with _rank_named(q, self.pids[q]):
                            socket.send_fds(link, [b"f"], [fd])
            except BaseException:
                os.close(fd)
                raise
            return fd
        link = self._links[0]
        with _rank_named(0):
            _receive(link, _Deadline(self._timeout + _GRACE_SECONDS))
            # Not socket.recv_fds, which drops the flag: a child that another thread starts now would inherit the file.
            _, ancillary, _, _ = link.recvmsg(1, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
        if not ancillary or len(ancillary[0][2]) != _FD.size:
            raise LaunchError("no file descriptor came from rank 0; this process may be out of them (ulimit -n)")
        (received,) = _FD.unpack(ancillary[0][2])
        return int(received)

    def close(self) -> None:
        """Local. Close the connections; idempotent."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _send_all(self, payload: bytes) -> None:
        for q, link in self._links.items():
            with _rank_named(q, self.pids[q]):
                _send(link, payload, _Deadline(self._timeout))

    @contextlib.contextmanager
    def _telling(self, prefix: str = "") -> Iterator[None]:
        """Rank 0: send exceptions raised in the block to the other ranks as text."""
        try:
            yield
        except BaseException as error:
            for link in self._links.values():
                _try_to_tell(link, f"{prefix}{error}")
            raise


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; raises TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


# -- joining ----------------------------------------------------------------------------------------------------------
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


def _join(ticket: bytes, rank: int, size: int, timeout: float, absence: Absence) -> tuple[socket.socket, bytes]:
    """The connection to rank 0, and its answer after all ranks have joined."""
    deadline = _Deadline(timeout)
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
                with _rank_named(0):
                    answer = _receive(link, accepted)
                stack.pop_all()
                return link, answer
        # More patient than rank 0, which can report who is missing.
        absence.check(f"rank {rank} found no rank 0 on this host", size - 1, patience=1.5)
        time.sleep(0.01)


def _prove(link: socket.socket, ticket: bytes, rank: int, size: int, deadline: _Deadline) -> _Deadline:
    if _peer_of(link)[1] != os.geteuid():
        raise LaunchError("the process that listens for this job belongs to another user; use a fresh ticket")
    theirs = _receive_exactly(link, _NONCE_BYTES, deadline)
    own = os.urandom(_NONCE_BYTES)
    claim = _claim(rank, size)
    link.sendall(_HELLO.pack(own, rank, size, _proof(ticket, b"join", theirs, own, claim)))
    answer = _receive_exactly(link, _MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(ticket, b"accept", theirs, own, claim)):
        raise LaunchError("the process that listens for this job does not hold its ticket; use a fresh ticket")
    return _Deadline(deadline.left() + _GRACE_SECONDS)


class _Listener:
    """The listening side of rank 0 while the others join."""

    def __init__(self, ticket: bytes, size: int, timeout: float, absence: Absence) -> None:
        self._ticket = ticket
        self._size = size
        self._deadline = _Deadline(timeout)
        self._absence = absence
        self._peers: _Peers = {}

    def gather(self) -> _Peers:
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
        return self._peers

    def _step(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        ready = selector.select(min(_LOOK_SECONDS, self._deadline.left()))
        if not ready:
            present = {pid for _, pid in self._peers.values()}
            self._absence.check(self._absent(), self._size - 1 - len(present), present=present)
        for key, _ in ready:
            if key.data is not None:  # a rank that has joined sends nothing until all have joined
                rank = key.data
                raise self._failure(
                    f"rank {rank} (pid {self._peers[rank][1]}) ended while the ranks were joining; see its output"
                )
            link, _ = listener.accept()
            try:
                rank = self._admit(link)
            except (OSError, struct.error):
                link.close()  # not a rank of this job, or one that has ended, which is then reported as missing
                continue
            selector.register(link, selectors.EVENT_READ, rank)

    def _admit(self, link: socket.socket) -> int:
        pid, uid = _peer_of(link)
        if uid != os.geteuid():
            raise PermissionError
        deadline = _Deadline(min(_HANDSHAKE_SECONDS, self._deadline.left()))
        own = os.urandom(_NONCE_BYTES)
        link.settimeout(deadline.left())
        link.sendall(own)
        theirs, rank, size, proof = _HELLO.unpack(_receive_exactly(link, _HELLO.size, deadline))
        claim = _claim(rank, size)
        if not hmac.compare_digest(proof, _proof(self._ticket, b"join", own, theirs, claim)):
            raise PermissionError
        link.sendall(_proof(self._ticket, b"accept", own, theirs, claim))
        fact = None
        if size != self._size:
            fact = f"rank {rank} (pid {pid}) expects {size} ranks on this host, rank 0 expects {self._size}"
        elif not 0 < rank < size:
            fact = f"a process (pid {pid}) joined as rank {rank} of {size}"
        elif rank in self._peers:
            fact = f"two processes (pids {self._peers[rank][1]} and {pid}) are rank {rank}"
        if fact:
            fact += "; number the processes 0, 1, ... and give all of them the same world size"
            _try_to_tell(link, fact)
            link.close()
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
            _try_to_tell(link, text)
            link.close()
        return LaunchError(text)


# -- messages ---------------------------------------------------------------------------------------------------------
class _rank_named(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a statement
    """Turns socket errors into a LaunchError that names the rank."""

    def __init__(self, rank: int, pid: int | None = None) -> None:
        self._name = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise LaunchError(f"{self._name} did not answer in time; see its output") from None
        if isinstance(error, OSError):
            raise LaunchError(f"{self._name} ended while the ranks were setting up; see its output") from error


def _send(link: socket.socket, payload: bytes, deadline: _Deadline, kind: int = _DATA) -> None:
    if len(payload) > _MAX_BYTES:
        raise LaunchError(
            f"{len(payload)} bytes are too many for the setup of a job; send them through the communicator"
        )
    link.settimeout(deadline.left())
    link.sendall(_HEADER.pack(kind, len(payload)) + payload)


def _try_to_tell(link: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # it may also have ended
        _send(link, text.encode(), _Deadline(1.0), _ERROR)


def _receive(link: socket.socket, deadline: _Deadline) -> bytes:
    kind, length = _HEADER.unpack(_receive_exactly(link, _HEADER.size, deadline))
    if length > 2 * _MAX_BYTES or kind not in (_DATA, _ERROR):
        raise LaunchError("a rank sent a message that cannot be read; use the same version of distopt everywhere")
    payload = _receive_exactly(link, length, deadline)
    if kind == _ERROR:
        raise LaunchError(payload.decode(errors="replace"))
    return payload


def _receive_exactly(link: socket.socket, count: int, deadline: _Deadline) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        link.settimeout(deadline.left())
        part: bytes = link.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        parts += part
    return bytes(parts)


def pack(payloads: Sequence[bytes]) -> bytes:
    """Local. Combine the payloads of all ranks into one message."""
    return struct.pack(f"!{len(payloads)}I", *map(len, payloads)) + b"".join(payloads)


def unpack(message: bytes, count: int) -> list[bytes]:
    """Local. The inverse of `pack` for `count` payloads.

    Raises:
        LaunchError: the lengths do not add up.
    """
    at = 4 * count
    if len(message) < at or at + sum(lengths := struct.unpack_from(f"!{count}I", message)) != len(message):
        raise LaunchError("rank 0 sent a message of the wrong length; use the same version everywhere")
    payloads = []
    for length in lengths:
        payloads.append(message[at : at + length])
        at += length
    return payloads
