"""The server of a job on several hosts: it tells ranks of others that end too early, and connects those of MPICH.

Rank 0 runs this file as a program; it uses the standard library only, so that it starts at once. It cannot be a thread
of rank 0, because MPI_Init holds Python's lock. It ends when all ranks have left, or one has failed.

Every rank opens a connection that stays with Python. Each message is a line; the server's are:

- `go`: all ranks have joined;
- `end CODE TEXT`: the job has failed. Leave with exit code CODE, and print TEXT unless it is empty;
- `lost CODE TEXT`: so it has, because a host cannot be reached.

Those of a rank are `left`: its end is no failure; and `end CODE`: it has failed, and has said so.

Where no MPI launcher serves MPICH's ranks, each hands another connection to MPICH. There it speaks PMI-1: lines of
`name=value` words ("PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems", Balaji et al.,
EuroMPI 2010).

Both sides of a connection first prove by HMAC that they know the job's key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from functools import partial

from ..stopwatch import Stopwatch

__all__ = [
    "HELLO",
    "NONCE_BYTES",
    "PROOF_BYTES",
    "REASON",
    "Gate",
    "Link",
    "Server",
    "keep_alive",
    "main",
    "proof",
    "turn",
]

NONCE_BYTES = PROOF_BYTES = 32
# Nonce, purpose, rank, number of ranks, host, process id, proof of the key.
HELLO = struct.Struct(f"!{NONCE_BYTES}scII64sI{PROOF_BYTES}s")
REASON = struct.Struct("!H")  # follows the proof: length of the reason for a refusal, 0 if admitted

_HANDSHAKE_SECONDS = 2.0
_SEND_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_MAX_STRANGERS = 64
_MAX_LINE_BYTES = 1 << 16
# A host that is switched off or unplugged sends no end of its connections: noticed 5 to 7 s after it.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))
_USER_TIMEOUT_MS = 7000
_ENDED = "has ended before the others; see its output"
_UNREACHABLE = "cannot be reached; see whether its host and the network are up"

_ANSWERS = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
    "get_appnum": "appnum appnum=0 rc=0",
    # MPICH names its files in /dev/shm after it: jobs of one host must differ.
    "get_my_kvsname": "my_kvsname kvsname=distopt_{job} rc=0",
    "get_universe_size": "universe_size size={size} rc=0",
    "finalize": "finalize_ack rc=0",
}


def keep_alive(link: socket.socket) -> None:
    """Local. Have the kernel notice within 7 s that the other end's host cannot be reached."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS), (socket.TCP_NODELAY, 1)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Local. What only a holder of the key can send; the role keeps one side's proof from serving as the other's."""
    return hmac.digest(key, role + b"".join(parts), "sha256")


def turn(selector: selectors.BaseSelector, seconds: float) -> None:
    """Local. Wait for events, and call what was registered with each; `seconds` at most."""
    for key, _ in selector.select(seconds):
        if selector.get_map().get(key.fd) == key:  # not unregistered by an earlier event of this round
            key.data()


@dataclass(eq=False)
class Link:
    """One connection; a stranger's (rank -1) until it has proved that it knows the key."""

    socket: socket.socket
    address: str  # without the prefix of an IPv4 address as one of IPv6
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    since: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    rank: int = -1
    purpose: bytes = b""
    host: str = ""
    pid: int = 0
    unreachable: bool = False  # lost without an end of the other side


class Gate:
    """Lets in whoever proves to know a key, and reads their lines.

    Args:
        key: the key.
        selector: waits for the connections; each is registered with a function for `turn` to call.
    """

    def __init__(self, key: bytes, selector: selectors.BaseSelector) -> None:
        self._key = key
        self._selector = selector
        self._listener: socket.socket | None = None
        self._strangers: list[Link] = []
        self._links: list[Link] = []

    def listen(self, listener: socket.socket) -> None:
        """Local. Accept connections from this listening TCP socket, and own it."""
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Local. Close the listener and all connections; idempotent."""
        for link in [*self._strangers, *self._links]:
            self._drop(link)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # For subclasses.
    def _refusal(self, link: Link, size: int) -> str:
        """Why somebody who knows the key, and expects `size` ranks or nodes, cannot come in; empty if he can."""
        raise NotImplementedError

    def _admitted(self, link: Link) -> None:
        """`link` has come in."""
        raise NotImplementedError

    def _lost(self, link: Link) -> None:
        """A connection that had come in has ended, from the other side."""
        raise NotImplementedError

    def _serve(self, link: Link, line: str) -> None:
        """A line has come."""
        raise NotImplementedError

    def _turned_away(self, link: Link) -> None:
        """Somebody does not know the key."""

    def _drop_slow_strangers(self) -> None:
        now = time.monotonic()
        for link in [link for link in self._strangers if now > link.since + _HANDSHAKE_SECONDS]:
            self._turn_away(link)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError:  # it has hung up already
            return
        link = Link(connection, address.removeprefix("::ffff:"))
        if len(self._strangers) >= _MAX_STRANGERS:
            self._turn_away(self._strangers[0])
        self._strangers.append(link)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, link))
        try:
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            connection.sendall(link.nonce)
        except OSError:
            self._drop(link)

    def _read(self, link: Link) -> None:
        part = b""
        try:
            part = link.socket.recv(1 << 16)
        except OSError as error:
            link.unreachable = not isinstance(error, ConnectionError)
        link.received += part
        if link.rank < 0:
            if not part:
                self._turn_away(link)
            elif len(link.received) >= HELLO.size:
                self._admit(link)
            return
        while link.socket.fileno() >= 0 and (end := link.received.find(b"\n")) >= 0:
            line = link.received[:end].decode("utf-8", "replace")
            del link.received[: end + 1]
            self._serve(link, line)
        if link.socket.fileno() >= 0 and (not part or len(link.received) > _MAX_LINE_BYTES):
            self._drop(link)
            self._lost(link)

    def _drop(self, link: Link) -> None:
        for links in (self._strangers, self._links):
            if link in links:
                links.remove(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _turn_away(self, link: Link) -> None:
        self._turned_away(link)
        self._drop(link)

    def _admit(self, link: Link) -> None:
        said = bytes(link.received[: HELLO.size])
        theirs, purpose, rank, size, host, pid, proved = HELLO.unpack(said)
        expected = proof(self._key, b"join", link.nonce, said[:-PROOF_BYTES])
        if not hmac.compare_digest(proved, expected) or len(link.received) != HELLO.size:
            self._turn_away(link)
            return
        link.received.clear()
        link.purpose, link.host, link.pid = purpose, host.rstrip(bytes(1)).decode("utf-8", "replace"), pid
        link.rank = rank
        reason = self._refusal(link, size)
        text = reason.encode()
        try:
            link.socket.sendall(proof(self._key, b"accept", theirs, link.nonce) + REASON.pack(len(text)) + text)
        except OSError:
            reason = "it has hung up"
        if reason:
            self._drop(link)
            return
        self._strangers.remove(link)
        self._links.append(link)
        self._admitted(link)

    def _tell(self, link: Link, line: str) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            link.socket.sendall(line.encode())


class Server(Gate):
    """Serves one job of `size` ranks until all have left or finalized MPI, or one has ended before.

    Args:
        listener: a listening TCP socket.
        key: the job's key.
        size: number of ranks.
        timeout: seconds within which all ranks must join.
        parent: process id of rank 0, the parent of this process.
    """

    def __init__(self, listener: socket.socket, key: bytes, size: int, timeout: float, parent: int) -> None:
        super().__init__(key, selectors.DefaultSelector())
        self.listen(listener)
        self._job = proof(key, b"name")[:8].hex()
        self._size = size
        self._timeout = timeout
        self._parent = parent
        self._mpi: dict[int, Link] = {}
        self._watchers: dict[int, Link] = {}
        self._names: dict[int, str] = {}
        self._values: dict[str, str] = {}
        self._waiting: set[int] = set()  # in the barrier
        self._finalized: set[int] = set()
        self._began = False  # all have joined
        self._ended = False

    def run(self) -> None:
        """Local. Serve; return at the end of the job, with all connections closed."""
        try:
            self._run()
        finally:
            self.close()
            self._selector.close()

    def _run(self) -> None:
        watch = Stopwatch()
        while not self._ended and len(self._finalized) < self._size:
            turn(self._selector, _LOOK_SECONDS)
            self._drop_slow_strangers()
            if watch.seconds() > self._timeout and len(self._watchers) < self._size:
                absent = [str(rank) for rank in range(self._size) if rank not in self._watchers]
                noun = "ranks" if len(absent) > 1 else "rank"
                self._end(
                    1,
                    f"{noun} {', '.join(absent)} of {self._size} did not join within {self._timeout:g} s; see the "
                    "output of those processes, and whether their hosts reach that of rank 0",
                )
            if os.getppid() != self._parent:
                self._gone(0)

    def _refusal(self, link: Link, size: int) -> str:
        links = {b"m": self._mpi, b"w": self._watchers}.get(link.purpose)
        name = f"rank {link.rank} on {link.host} (pid {link.pid})"
        if links is None:
            return f"{name} wants something else of this server"
        if size != self._size:
            return f"{name} expects {size} ranks, rank 0 expects {self._size}"
        if link.rank >= size or link.rank in links:
            other = self._names.get(link.rank, f"there are {size} ranks")
            return f"{name} is not the only one of that rank: {other}"
        self._names[link.rank] = name
        return ""

    def _admitted(self, link: Link) -> None:
        links = self._mpi if link.purpose == b"m" else self._watchers
        links[link.rank] = link
        if links is self._watchers and len(self._watchers) == self._size:
            self._began = True
            for watcher in self._watchers.values():
                self._tell(watcher, "go\n")

    def _lost(self, link: Link) -> None:
        # What the rank has said before it went may still lie unread on its other connection.
        other = self._watchers.get(link.rank, link)
        if other is not link and other.socket.fileno() >= 0 and select.select([other.socket], [], [], 0)[0]:
            self._read(other)
        self._gone(link.rank, unreachable=link.unreachable)

    def _gone(self, rank: int, *, unreachable: bool = False) -> None:
        if rank not in self._finalized:
            kind, how = ("lost", _UNREACHABLE) if unreachable else ("end", _ENDED)
            self._end(1, f"{self._names.get(rank, f'rank {rank}')} {how}", but=rank, kind=kind)

    def _end(self, code: int, text: str, but: int = -1, kind: str = "end") -> None:
        """Tell all ranks but one that the job has failed, and say why: the ranks may be killed before they can.

        While ranks join, the first of them says why.
        """
        if not self._ended:
            self._ended = True
            told = [rank for rank in sorted(self._watchers) if rank != but]
            if text and self._began:
                with contextlib.suppress(OSError):  # nobody reads it
                    os.write(2, f"{text}\n".encode())
                text = ""
            for rank in told:
                self._tell(self._watchers[rank], f"{kind} {code} {text if rank == told[0] else ''}\n")

    def _hear(self, link: Link, line: str) -> None:
        """A rank has left, or has failed with an exit code."""
        if line == "left":
            self._finalized.add(link.rank)
        elif line.startswith("end "):
            self._end(_exit_code(line[4:]), "", but=link.rank)

    # -- PMI-1 -----------------------------------------------------------------------------------------------------
    def _serve(self, link: Link, line: str) -> None:
        if self._ended:
            return
        if link.purpose != b"m":
            self._hear(link, line)
            return
        words = dict(word.partition("=")[::2] for word in line.split())
        command = words.get("cmd", "")
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
            answer = "put_result rc=0"
        elif command == "get":
            value = self._values.get(words.get("key", ""))
            answer = "get_result rc=-1" if value is None else f"get_result rc=0 value={value}"
        elif command == "barrier_in":
            self._waiting.add(link.rank)
            if len(self._waiting) == self._size:
                self._waiting.clear()
                for other in self._mpi.values():
                    self._tell(other, "cmd=barrier_out rc=0\n")
            return
        elif command == "abort":
            self._end(_exit_code(words.get("exitcode", "")), "", but=link.rank)
            return
        else:
            answer = _ANSWERS.get(command, f"{command} rc=-1").format(size=self._size, job=self._job)
        if command == "finalize":
            self._finalized.add(link.rank)
        self._tell(link, f"cmd={answer}\n")


def _exit_code(digits: str) -> int:
    return int(digits) & 0xFF or 1 if digits.isascii() and digits.isdigit() else 1


def main() -> None:
    """Serve as `distopt.launch.watch.watch.start_server`, which started this program, has told it."""
    fd, size, timeout, parent = sys.argv[1:]
    # The job's launcher may signal all of its processes; this one ends with rank 0.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    key = sys.stdin.buffer.read()
    Server(socket.socket(fileno=int(fd)), key, int(size), float(timeout), int(parent)).run()
