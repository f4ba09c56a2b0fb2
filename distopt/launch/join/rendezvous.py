"""The ranks of one host find each other and exchange a few bytes.

Rank 0 listens on an abstract Unix socket whose name is a hash of the job's ticket, and the others connect. Abstract
names vanish with their process, so nothing is left behind. They are public, so the name must not reveal the ticket.
Both sides prove by HMAC that they know it, and the kernel reports the user and process at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ..messages import Deadline, in_slices, pack, rank_named, receive, send, try_to_tell, unpack
from ..watch.siblings import Absence
from .joining import GRACE_SECONDS, Listener, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HostGroup"]

_FD = struct.Struct("i")


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
            peers = Listener(ticket, size, timeout, absence).gather()
            self._links = {q: link for q, (link, _) in peers.items()}
            self.pids = (os.getpid(), *(pid for _, (_, pid) in sorted(peers.items())))
            with self._telling():
                self._send_all(struct.pack(f"!{size}i", *self.pids))
        else:
            link, answer = join(ticket, rank, size, timeout, absence)
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
            with rank_named(0):
                with contextlib.suppress(ConnectionError):  # if rank 0 has failed, its reason can still be read
                    send(link, payload, deadline)
                return unpack(receive(link, Deadline(self._timeout + GRACE_SECONDS)), self.size)
        payloads = [payload]
        with self._telling():
            for q, link in sorted(self._links.items()):
                with rank_named(q, self.pids[q]):
                    payloads.append(receive(link, deadline))
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
                        with rank_named(q, self.pids[q]):
                            socket.send_fds(link, [b"f"], [fd])
            except BaseException:
                os.close(fd)
                raise
            return fd
        link = self._links[0]
        with rank_named(0):
            deadline = Deadline(self._timeout + GRACE_SECONDS)
            receive(link, deadline)
            # Not socket.recv_fds, which drops the flag: a child that another thread starts now would inherit the file.
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

    def _send_all(self, payload: bytes) -> None:
        for q, link in self._links.items():
            with rank_named(q, self.pids[q]):
                send(link, payload, Deadline(self._timeout))

    @contextlib.contextmanager
    def _telling(self, prefix: str = "") -> Iterator[None]:
        """Rank 0: send exceptions raised in the block to the other ranks as text."""
        try:
            yield
        except BaseException as error:
            for link in self._links.values():
                try_to_tell(link, f"{prefix}{error}")
            raise
