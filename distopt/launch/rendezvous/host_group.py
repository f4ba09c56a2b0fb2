"""The ranks of one host find each other, and pass file descriptors.

Rank 0 listens on an abstract Unix socket whose name is a hash of the job's key, and the others connect. Abstract
names vanish with their process, so nothing is left behind. They are public: the name must not reveal the key, and
another user may have taken it, so that rank 0 has a choice of several. Both sides prove that they know the key
(`distopt.launch.gate`). The connections then serve a key-value client (`distopt.launch.rendezvous.key_value`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator

from ...errors import LaunchError
from ..end_together.siblings import Absence
from ..gate import FOR_HOST_GROUP, Link, RefusedError, StrangerError, introduce
from ..keys import KeyGate
from ..processes import abstract_name
from ..sockets import handle_events, in_slices, listener_of, peer_of
from ..stopwatch import GRACE_SECONDS, Deadline
from ..words import ranks_of
from .key_value import KeyValueClient, LocalClient, RemoteClient, client_alone

_log = logging.getLogger("distopt")

_N_ADDRESSES = 8
_FD = struct.Struct("i")
_LOOK_SECONDS = 0.1  # between two looks of rank 0 for absent ranks


class HostGroup:
    """The ranks of one host, connected through rank 0.

    Args:
        key: 16 secret bytes that the launcher gave to every rank.
        rank: number of this process on its host.
        size: number of processes on the host.
        timeout: seconds to wait for the others to join, and in each later exchange.
        absence: handles ranks that do not join.

    Attributes:
        client: exchanges bytes with the others. Rank 0 is its server, and serves while it waits itself.
        pids: the process of each rank.

    Raises:
        LaunchError: a rank is missing or duplicated, has another world size, or does not know the key.
    """

    client: KeyValueClient

    def __init__(self, key: bytes, rank: int, size: int, timeout: float, absence: Absence | None = None) -> None:
        self.rank = rank
        self.size = size
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._timeout = timeout
        self._server: _Server | None = None
        if size == 1:
            self.client = client_alone(timeout)
            return
        absence = absence or Absence()
        try:
            if rank == 0:
                self._server = server = _Server(key, size, timeout, absence)
                self.client = LocalClient(0, range(size), timeout, server.values, server.serve, server.fail)
                self.pids = (os.getpid(), *server.gather())
            else:
                link = _find_rank_0(key, rank, size, timeout, absence)
                self.client = RemoteClient(link, rank, range(size), timeout, "rank 0", patience=GRACE_SECONDS)
            self.pids = struct.unpack(
                f"!{size}i", self.client.all_gather(struct.pack(f"!{len(self.pids)}i", *self.pids))[0]
            )
        except BaseException:
            self.close()
            raise

    def share_fd(self, make: Callable[[], int]) -> int:
        """Collective. Rank 0 makes a file descriptor; each rank returns its own descriptor of the same file.

        Raises:
            LaunchError: rank 0 failed or ended.
        """
        fd = -1
        if self.rank == 0:
            with self._reporting_errors("rank 0 could not make the shared file: "):
                fd = make()
        with contextlib.ExitStack() as stack, self._reporting_errors():
            if fd >= 0:
                stack.callback(os.close, fd)
            self.client.barrier()  # rank 0 has made it
            for q, link in self._server.peers.items() if self._server is not None else ():
                with _rank_named(q, self.pids[q]):
                    socket.send_fds(link.socket, [b"f"], [fd])
            stack.pop_all()
        return _receive_fd(self.client) if isinstance(self.client, RemoteClient) else fd

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._server is not None:
            self._server.close()
        if hasattr(self, "client"):
            self.client.close()

    def __del__(self) -> None:  # the script may never close its job
        self.close()

    @contextlib.contextmanager
    def _reporting_errors(self, prefix: str = "") -> Iterator[None]:
        """Rank 0: send exceptions raised in the block to the other ranks as text."""
        try:
            yield
        except BaseException as error:
            if self._server is not None:
                self._server.fail(f"{prefix}{error}")
            raise


def _receive_fd(client: RemoteClient) -> int:
    link = client.link
    with _rank_named(0):
        # socket.recv_fds drops the flag, and a child that another thread starts now would inherit the file.
        _, ancillary, _, _ = in_slices(
            link,
            Deadline(client.seconds),
            lambda: link.recvmsg(1, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC),
        )
    if not ancillary or len(ancillary[0][2]) != _FD.size:
        raise LaunchError("no file descriptor came from rank 0; this process may be out of them (ulimit -n)")
    (received,) = _FD.unpack(ancillary[0][2])
    return int(received)


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


# -- how they meet: rank 0 listens, the others come --------------------------------------------------------------------
def _address(key: bytes, choice: int = 0) -> str:
    return abstract_name(b"distopt address %d " % choice + key)


def _find_rank_0(key: bytes, rank: int, size: int, timeout: float, absence: Absence) -> socket.socket:
    """The connection to rank 0, which has admitted this rank."""
    deadline = Deadline(timeout)
    foreign = ""
    for choice in itertools.cycle(range(_N_ADDRESSES)):
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                link.settimeout(deadline.left())
                link.connect(_address(key, choice))
                if peer_of(link)[1] != os.geteuid():
                    foreign = "; a process of another user listens in its place, so use a fresh ticket"
                    raise ConnectionRefusedError
                introduce(link, key, FOR_HOST_GROUP, rank, size, deadline)
                stack.pop_all()
                return link
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


class _Server(KeyGate):
    """Rank 0: lets the others join, and then serves their values.

    Attributes:
        peers: the connections of the others that have joined.
    """

    purpose_of_clients = FOR_HOST_GROUP

    def __init__(self, key: bytes, size: int, timeout: float, absence: Absence) -> None:
        # Not epoll: a forked child that closes its copy would take the connections out of this process's, too.
        super().__init__(key, selectors.PollSelector())
        self._size = size
        self._deadline = Deadline(timeout)
        self._absence = absence
        self._joining = True
        self._failed = ""
        self.peers = self._clients

    def gather(self) -> list[int]:
        """The processes of all other ranks, in their order, once they have joined.

        Raises:
            LaunchError: a rank is missing or has ended, or two have one number or expect different sizes.
        """
        try:
            self.listen(self._bound())
            while len(self.peers) < self._size - 1 and not self._failed:
                self._wait()
            if self._failed:
                raise LaunchError(self._failed)
        except BaseException as error:
            self.fail(
                str(error) if isinstance(error, LaunchError) else "rank 0 was interrupted while the ranks were joining"
            )
            raise
        self.stop_listening()
        self._joining = False
        return [link.pid for _, link in sorted(self.peers.items())]

    def serve(self, deadline: Deadline, waits: bool) -> bool:
        """Serve for a moment; whether all have been sent their answers.

        Args:
            deadline: for all of it.
            waits: whether to wait for something to do.

        Raises:
            TimeoutError: the deadline has passed.
        """
        handle_events(self._selector, min(_LOOK_SECONDS, deadline.left()) if waits or self._unsent else 0.0)
        return not self._unsent

    def close(self) -> None:
        """Close all connections; idempotent."""
        super().close()
        self._selector.close()

    def _wait(self) -> None:
        try:
            handle_events(self._selector, min(_LOOK_SECONDS, self._deadline.left()))
        except TimeoutError:
            raise LaunchError(
                f"{self._absent()} within {self._deadline.seconds:g} s; every rank must call distopt.init or make a "
                "DistOpt; see the output of those processes"
            ) from None
        self._drop_slow_strangers()
        present = {link.pid for link in self.peers.values()}
        self._absence.check(self._absent(), self._size - 1 - len(present), present=present)

    def _bound(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for choice in range(_N_ADDRESSES):
            name = _address(self._key, choice)
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
        elif rank in self.peers:
            fact = f"two processes (pids {self.peers[rank].pid} and {pid}) are rank {rank}"
        if fact:
            self._failed = f"{fact}; number the processes 0, 1, ... and give all of them the same world size"
        return self._failed

    def _lost(self, link: Link) -> None:
        super()._lost(link)
        if self._joining:
            self._failed = f"rank {link.rank} (pid {link.pid}) ended while the ranks were joining; see its output"

    def _out_of_files(self) -> None:
        self._failed = "rank 0 may open no more files, and so let no other rank in; raise ulimit -n"

    def _absent(self) -> str:
        absent = [q for q in range(1, self._size) if q not in self.peers]
        return f"{ranks_of(absent, self._size)} did not join rank 0 on this host"
