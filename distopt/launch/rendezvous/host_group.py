"""The ranks of one host find each other and exchange a few bytes.

Rank 0 listens on an abstract Unix socket whose name is a hash of the job's ticket, and the others connect. Abstract
names vanish with their process, so nothing is left behind. They are public: the name must not reveal the ticket, and
another user may have taken it, so that rank 0 has a choice of several. Both sides prove that they know the ticket
(`distopt.launch.gate`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...errors import LaunchError
from ..end_together.siblings import Absence
from ..gate import FOR_HOST_GROUP, Gate, Link, RefusedError, StrangerError, introduce
from ..sockets import handle_events, in_slices, listener_of, peer_of, receive_exactly
from ..stopwatch import GRACE_SECONDS, Deadline

_log = logging.getLogger("distopt")

_N_ADDRESSES = 8
_FD = struct.Struct("i")
_HEADER = struct.Struct("!BI")  # kind and length of a message
_DATA, _ERROR = 0, 1
MAX_BYTES = 16 << 20
_SENDER_SECONDS = 0.5  # then a rank that gives up no longer waits for the sender of the reason to end
_LOOK_SECONDS = 0.1  # between two looks of rank 0 for absent ranks


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
        self._links: dict[int, socket.socket] = {}  # rank 0 has every other rank, the others have rank 0
        self.rank = rank
        self.size = size
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._timeout = timeout
        if size == 1:
            return
        absence = absence or Absence()
        if rank == 0:
            peers = sorted(_Listener(ticket, size, timeout, absence).gather().items())
            self._links = {q: link.socket for q, link in peers}
            self.pids = (os.getpid(), *(link.pid for _, link in peers))
            with self._reporting_errors():
                self._send_all(struct.pack(f"!{size}i", *self.pids))
        else:
            link, answer = _find_rank_0(ticket, rank, size, timeout, absence)
            self._links = {0: link}
            self.pids = struct.unpack(f"!{size}i", answer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ.

        Raises:
            LaunchError: a rank ended or did not take part in time.
        """
        if self.size == 1:
            return [payload]
        deadline = Deadline(self._timeout)
        if self.rank != 0:
            link = self._links[0]
            with _rank_named(0):
                with contextlib.suppress(ConnectionError):  # if rank 0 has failed, its reason can still be read
                    _send(link, payload, deadline)
                return unpack(_receive(link, Deadline(self._timeout + GRACE_SECONDS)), self.size)
        payloads = [payload]
        with self._reporting_errors():
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
            with self._reporting_errors("rank 0 could not make the shared file: "):
                fd = make()
            with contextlib.ExitStack() as stack, self._reporting_errors():
                stack.callback(os.close, fd)
                self._send_all(b"a descriptor follows")
                for q, link in self._links.items():
                    with _rank_named(q, self.pids[q]):
                        socket.send_fds(link, [b"f"], [fd])
                stack.pop_all()
            return fd
        link = self._links[0]
        with _rank_named(0):
            deadline = Deadline(self._timeout + GRACE_SECONDS)
            _receive(link, deadline)
            # socket.recv_fds drops the flag, and a child that another thread starts now would inherit the file.
            _, ancillary, _, _ = in_slices(
                link, deadline, lambda: link.recvmsg(1, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
            )
        if not ancillary or len(ancillary[0][2]) != _FD.size:
            raise LaunchError("no file descriptor came from rank 0; this process may be out of them (ulimit -n)")
        (received,) = _FD.unpack(ancillary[0][2])
        return int(received)

    def close(self) -> None:
        """Local. Close the connections; idempotent."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def __del__(self) -> None:  # the script may never close its job
        self.close()

    def _send_all(self, payload: bytes) -> None:
        for q, link in self._links.items():
            with _rank_named(q, self.pids[q]):
                _send(link, payload, Deadline(self._timeout))

    @contextlib.contextmanager
    def _reporting_errors(self, prefix: str = "") -> Iterator[None]:
        """Rank 0: send exceptions raised in the block to the other ranks as text."""
        try:
            yield
        except BaseException as error:
            for link in self._links.values():
                _try_to_send(link, f"{prefix}{error}")
            raise


# -- messages: bytes, or the reason why there are none ----------------------------------------------------------------
@contextlib.contextmanager
def _rank_named(rank: int, pid: int | None = None) -> Iterator[None]:
    """Turn errors of a socket in the block into a LaunchError that names the rank at its other end."""
    name = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"
    try:
        yield
    except TimeoutError:
        raise LaunchError(f"{name} did not answer in time; see its output") from None
    except OSError as error:
        raise LaunchError(f"{name} ended while the ranks were setting up; see its output") from error


def _send(link: socket.socket, payload: bytes, deadline: Deadline, kind: int = _DATA) -> None:
    """Local. Send a message.

    Raises:
        LaunchError: it is too long.
        OSError: the other end has closed the link, or did not read it in time.
    """
    check_length(payload)
    left = memoryview(_HEADER.pack(kind, len(payload)) + payload)
    while left:
        left = left[in_slices(link, deadline, partial(link.send, left)) :]


def _try_to_send(link: socket.socket, text: str) -> None:
    """Local. Send the reason why the other end must give up, if it is still there."""
    with contextlib.suppress(OSError):  # it may also have ended
        _send(link, text.encode(), Deadline(1.0), _ERROR)


def _receive(link: socket.socket, deadline: Deadline) -> bytes:
    """Local. The next message.

    Raises:
        LaunchError: it is a reason to give up, or no message.
        OSError: the other end has closed the link, or sent nothing in time.
    """
    kind, length = _HEADER.unpack(receive_exactly(link, _HEADER.size, deadline))
    if length > 2 * MAX_BYTES or kind not in (_DATA, _ERROR):
        raise LaunchError("a rank sent a message that cannot be read; use the same version of distopt everywhere")
    payload = receive_exactly(link, length, deadline)
    if kind == _ERROR:
        received = LaunchError(payload.decode(errors="replace"))
        received.is_consequence = True
        with contextlib.suppress(OSError):  # the sender, which fails for this reason, should report it first
            in_slices(link, Deadline(_SENDER_SECONDS), partial(link.recv, 1))
        raise received
    return payload


def check_length(payload: bytes) -> None:
    """Local. Raises a LaunchError if it is too long for the set-up of a job."""
    if len(payload) > MAX_BYTES:
        raise LaunchError(
            f"{len(payload)} bytes are too many for the setup of a job; send them through the communicator"
        )


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


# -- how they meet: rank 0 listens, the others come --------------------------------------------------------------------
def _address(ticket: bytes, choice: int = 0) -> str:
    return "\0distopt-" + hashlib.sha256(b"distopt address %d " % choice + ticket).hexdigest()[:32]


def _find_rank_0(ticket: bytes, rank: int, size: int, timeout: float, absence: Absence) -> tuple[socket.socket, bytes]:
    """The connection to rank 0, and its answer after all ranks have joined."""
    deadline = Deadline(timeout)
    foreign = ""
    for choice in itertools.cycle(range(_N_ADDRESSES)):
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                link.settimeout(deadline.left())
                link.connect(_address(ticket, choice))
                if peer_of(link)[1] != os.geteuid():
                    foreign = "; a process of another user listens in its place, so use a fresh ticket"
                    raise ConnectionRefusedError
                introduce(link, ticket, FOR_HOST_GROUP, rank, size, deadline)
                with _rank_named(0):
                    answer = _receive(link, Deadline(deadline.left() + GRACE_SECONDS))
                stack.pop_all()
                return link, answer
            except TimeoutError:
                raise LaunchError(
                    f"rank {rank} found no rank 0 on this host within {timeout:g} s; check that rank 0 runs here, "
                    f"in the same network namespace and with the same ticket{foreign}"
                ) from None
            except RefusedError as error:
                raise LaunchError(str(error)) from None
            except StrangerError:
                raise LaunchError(
                    "the process that listens for this job does not hold its ticket; use a fresh ticket"
                ) from None
            except (ConnectionError, BlockingIOError):  # rank 0 is not listening yet, its queue is full, or it gave up
                pass
        if choice == 0:
            # Rank 0 is less patient, because it can report who is missing.
            absence.check(f"rank {rank} found no rank 0 on this host", size - 1, patience=1.5)
            time.sleep(0.01)
    raise AssertionError


class _Listener(Gate):
    """Rank 0 while the others join."""

    def __init__(self, ticket: bytes, size: int, timeout: float, absence: Absence) -> None:
        super().__init__(ticket, selectors.DefaultSelector())
        self._ticket = ticket
        self._size = size
        self._deadline = Deadline(timeout)
        self._absence = absence
        self._peers: dict[int, Link] = {}
        self._failed = ""

    def gather(self) -> dict[int, Link]:
        """Local. The connections of all other ranks.

        Raises:
            LaunchError: a rank is missing or has ended, or two have one number or expect different sizes.
        """
        try:
            self.listen(self._bound())
            while len(self._peers) < self._size - 1 and not self._failed:
                self._wait()
            if self._failed:
                raise LaunchError(self._failed)
            for link in self._peers.values():
                self._selector.unregister(link.socket)
                self._links.remove(link)
        except BaseException as error:
            text = (
                str(error) if isinstance(error, LaunchError) else "rank 0 was interrupted while the ranks were joining"
            )
            for link in self._peers.values():
                _try_to_send(link.socket, text)
            raise
        finally:
            self.close()
            self._selector.close()
        return self._peers

    def _wait(self) -> None:
        try:
            handle_events(self._selector, min(_LOOK_SECONDS, self._deadline.left()))
        except TimeoutError:
            raise LaunchError(
                f"{self._absent()} within {self._deadline.seconds:g} s; every rank must call distopt.init or make a "
                "DistOpt; see the output of those processes"
            ) from None
        self._drop_slow_strangers()
        present = {link.pid for link in self._peers.values()}
        self._absence.check(self._absent(), self._size - 1 - len(present), present=present)

    def _bound(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for choice in range(_N_ADDRESSES):
            name = _address(self._ticket, choice)
            try:
                listener.bind(name)
                listener.listen(self._size)
            except OSError as error:
                fact = str(error)
                if error.errno != errno.EADDRINUSE or listener_of(name) == os.geteuid():
                    break
                _log.warning("another user has taken the name %r of rank 0, which takes another", name)
            else:
                return listener
        listener.close()
        raise LaunchError(
            f"rank 0 cannot listen for the other ranks ({fact}); "
            "is there a second rank 0, or another job with this ticket?"
        )

    def _refusal(self, link: Link, size: int) -> str:
        rank, pid, fact = link.rank, link.pid, ""
        if size != self._size:
            fact = f"rank {rank} (pid {pid}) expects {size} ranks on this host, rank 0 expects {self._size}"
        elif not 0 < rank < size:
            fact = f"a process (pid {pid}) joined as rank {rank} of {size}"
        elif rank in self._peers:
            fact = f"two processes (pids {self._peers[rank].pid} and {pid}) are rank {rank}"
        if fact:
            self._failed = f"{fact}; number the processes 0, 1, ... and give all of them the same world size"
        return self._failed

    def _admitted(self, link: Link) -> None:
        self._peers[link.rank] = link

    def _lost(self, link: Link) -> None:
        del self._peers[link.rank]
        self._failed = f"rank {link.rank} (pid {link.pid}) ended while the ranks were joining; see its output"

    def _serve(self, link: Link, line: str) -> None:
        """Nothing: a rank that has joined sends no lines until all have."""

    def _absent(self) -> str:
        absent = [str(q) for q in range(1, self._size) if q not in self._peers]
        noun = "ranks" if len(absent) > 1 else "rank"
        return f"{noun} {', '.join(absent)} of {self._size} did not join rank 0 on this host"
