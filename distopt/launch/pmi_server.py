"""The server of a job on several hosts: it tells ranks of others that end too early, and connects those of MPICH.

Rank 0 runs this file as a program; it uses the standard library only, so that it starts at once. It cannot be a thread
of rank 0, because MPI_Init holds Python's lock. It ends with rank 0.

Every rank opens a connection that stays with Python. Each message is a line; the server's are:

- `go`: all ranks have joined;
- `end CODE TEXT`: the job has failed. Leave with exit code CODE, and print TEXT unless it is empty.

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
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

__all__ = ["HELLO", "NONCE_BYTES", "PROOF_BYTES", "REASON", "Server", "keep_alive", "proof"]

NONCE_BYTES = PROOF_BYTES = 32
# Nonce, purpose, rank, number of ranks, host, process id, proof of the key.
HELLO = struct.Struct(f"!{NONCE_BYTES}scII64sI{PROOF_BYTES}s")
REASON = struct.Struct("!H")  # follows the proof: length of the reason for a refusal, 0 if admitted

_HANDSHAKE_SECONDS = 2.0
_SEND_SECONDS = 2.0
_LOOK_SECONDS = 0.2
# MPI_Finalize of the other ranks may end this much later than that of rank 0.
_FINALIZE_SECONDS = 5.0
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
    "get_my_kvsname": "my_kvsname kvsname=distopt rc=0",
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


@dataclass(eq=False)
class _Link:
    """One connection; a stranger's (rank -1) until it has proved that it knows the key."""

    socket: socket.socket
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    since: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    rank: int = -1
    purpose: bytes = b""


class Server:
    """Serves one job of `size` ranks until all have left or finalized MPI, one has ended before, or rank 0 is gone.

    Args:
        listener: a listening TCP socket.
        key: the job's key.
        size: number of ranks.
        timeout: seconds within which all ranks must join.
        parent: process id of rank 0, the parent of this process.
    """

    def __init__(self, listener: socket.socket, key: bytes, size: int, timeout: float, parent: int) -> None:
        self._listener = listener
        self._key = key
        self._size = size
        self._timeout = timeout
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Link] = []
        self._mpi: dict[int, _Link] = {}
        self._watchers: dict[int, _Link] = {}
        self._names: dict[int, str] = {}
        self._values: dict[str, str] = {}
        self._waiting: set[int] = set()  # in the barrier
        self._finalized: set[int] = set()
        self._ended = False
        self._began = False
    def run(self) -> None:
        """Local. Serve; return at the end of the job, with all connections closed."""
        try:
            self._run()
        finally:
            for link in [key.data for key in self._selector.get_map().values() if key.data is not None]:
                self._drop(link)
            self._selector.close()

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        join_by = time.monotonic() + self._timeout
        leave_by = float("inf")
        while not self._ended and len(self._finalized) < self._size and time.monotonic() < leave_by:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.data is None:
                    self._accept()
                elif key.data.socket.fileno() >= 0:  # not dropped by an earlier event of this round
                    self._read(key.data)
            now = time.monotonic()
            for link in [link for link in self._strangers if now > link.since + _HANDSHAKE_SECONDS]:
                self._drop(link)
            if now > join_by and len(self._watchers) < self._size:
                absent = [str(rank) for rank in range(self._size) if rank not in self._watchers]
                noun = "ranks" if len(absent) > 1 else "rank"
                self._end(
                    1,
                    f"{noun} {', '.join(absent)} of {self._size} did not join within {self._timeout:g} s; see the "
                    "output of those processes, and whether their hosts reach that of rank 0",
                )
            if os.getppid() != self._parent and leave_by == float("inf"):
                if 0 in self._finalized:
                    leave_by = now + _FINALIZE_SECONDS
                else:
                    self._gone(0)

    # -- connections -----------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has hung up already
            return
        link = _Link(connection)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(self._strangers[0])
        self._strangers.append(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        try:
            connection.settimeout(_SEND_SECONDS)
            keep_alive(connection)
            connection.sendall(link.nonce)
        except OSError:
            self._drop(link)

    def _read(self, link: _Link) -> None:
        how, part = _ENDED, b""
        try:
            part = link.socket.recv(1 << 16)
        except ConnectionError:  # it ended before it had read everything
            pass
        except OSError:
            how = _UNREACHABLE
        link.received += part
        if not part:
            self._drop(link)
            if link.rank >= 0:
                self._gone(link.rank, how)
        elif link.rank < 0:
            if len(link.received) >= HELLO.size:
                self._admit(link)
        else:
            while not self._ended and (end := link.received.find(b"\n")) >= 0:
                line = link.received[:end].decode("utf-8", "replace")
                del link.received[: end + 1]
                (self._serve if link.purpose == b"m" else self._hear)(link, line)
            if len(link.received) > _MAX_LINE_BYTES:
                self._drop(link)
                self._gone(link.rank)

    def _drop(self, link: _Link) -> None:
        if link in self._strangers:
            self._strangers.remove(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.socket.close()

    def _admit(self, link: _Link) -> None:
        said = bytes(link.received[: HELLO.size])
        theirs, purpose, rank, size, host, pid, proved = HELLO.unpack(said)
        links = {b"m": self._mpi, b"w": self._watchers}.get(purpose)
        expected = proof(self._key, b"join", link.nonce, said[:-PROOF_BYTES])
        if not hmac.compare_digest(proved, expected) or links is None or len(link.received) != HELLO.size:
            self._drop(link)
            return
        name = f"rank {rank} on {host.rstrip(bytes(1)).decode('utf-8', 'replace')} (pid {pid})"
        reason = ""
        if size != self._size:
            reason = f"{name} expects {size} ranks, rank 0 expects {self._size}"
        elif rank >= size or rank in links:
            reason = f"{name} is not the only one of that rank: {self._names.get(rank, f'there are {size} ranks')}"
        text = reason.encode()
        try:
            link.socket.sendall(proof(self._key, b"accept", theirs, link.nonce) + REASON.pack(len(text)) + text)
        except OSError:
            reason = "it has hung up"
        if reason:
            self._drop(link)
            return
        self._strangers.remove(link)
        link.received.clear()
        link.rank, link.purpose = rank, purpose
        links[rank] = link
        self._names[rank] = name
        if purpose == b"w" and len(self._watchers) == self._size:
            self._began = True
            for watcher in self._watchers.values():
                self._tell(watcher, "go\n")

    def _tell(self, link: _Link, line: str) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            link.socket.sendall(line.encode())

    def _gone(self, rank: int, how: str = _ENDED) -> None:
        if rank not in self._finalized:
            self._end(1, f"{self._names.get(rank, f'rank {rank}')} {how}", but=rank)

    def _hear(self, link: _Link, line: str) -> None:
        """A rank has left, or has failed with an exit code."""
        if line == "left":
            self._finalized.add(link.rank)
        elif line.startswith("end "):
            self._end(_exit_code(line[4:]), "", but=link.rank)

    def _end(self, code: int, text: str, but: int = -1) -> None:
        """Tell all ranks but one that the job has failed; the first of them also prints why."""
        if not self._ended:
            self._ended = True
            told = [rank for rank in sorted(self._watchers) if rank != but]
            if text and self._began:
                os.write(2, f"{text}\n".encode())
                text = ""
            for rank in told:
                self._tell(self._watchers[rank], f"end {code} {text if rank == told[0] else ''}\n")

    # -- PMI-1 -----------------------------------------------------------------------------------------------------
    def _serve(self, link: _Link, line: str) -> None:
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
            answer = _ANSWERS.get(command, f"{command} rc=-1").format(size=self._size)
        if command == "finalize":
            self._finalized.add(link.rank)
        self._tell(link, f"cmd={answer}\n")


def _exit_code(digits: str) -> int:
    return int(digits) & 0xFF or 1 if digits.isascii() and digits.isdigit() else 1


def _main() -> None:
    fd, size, timeout, parent = sys.argv[1:]
    # The job's launcher may signal all of its processes; this one ends with rank 0.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    key = sys.stdin.buffer.read()
    Server(socket.socket(fileno=int(fd)), key, int(size), float(timeout), int(parent)).run()


if __name__ == "__main__":
    _main()
