"""The server of a job: it keeps values, and notifies ranks of others that end too early.

Rank 0 runs this file as a program; it uses the standard library only, so that it starts at once. It cannot be a thread
of rank 0, because a computation may hold Python's lock for long. It ends when all ranks have left, or one has failed.

Every rank opens a connection that stays with Python. Each message is a line; the server's are:

- `go`: all ranks have joined;
- `end CODE RANK TEXT`: the job has failed because of TEXT, if known. Leave with exit code CODE; RANK alone prints it;
- `lost CODE RANK TEXT`: so it has, because a host cannot be reached.

Messages of a rank are `left`: its end is not a failure; and `end CODE`: it has failed, and has reported it.

Every rank may open another for the job's values (`distopt.launch.keys`). A server may serve values only.

Both sides of a connection first prove that they know the job's key: `distopt.launch.gate`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys

from ..gate import FOR_KEYS, Link
from ..keys import KeyGate
from ..sockets import handle_events, say
from ..stopwatch import Stopwatch
from ..words import ranks_of

_ENDED = "has ended before the others; see its output"
_UNREACHABLE = "cannot be reached; see whether its host and the network are up"


class Server(KeyGate):
    """Serves one job of `size` ranks until all have left, or one has ended before.

    Args:
        listener: a listening TCP socket.
        key: the job's key.
        size: number of ranks.
        timeout: seconds that the ranks have to join.
        parent: process id of rank 0, the parent of this process.
        end_together: whether the ranks end together; else only values are served, and a rank leaves by its end.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, size: int, timeout: float, parent: int, *, end_together: bool = True
    ) -> None:
        super().__init__(key, selectors.DefaultSelector())
        self.most_strangers = max(self.most_strangers, 2 * size)
        self.listen(listener)
        self._end_together = end_together
        self._size = size
        self._timeout = timeout
        self._parent = parent
        self._lifelines: dict[int, Link] = {}
        self._names: dict[int, str] = {}
        self._left: set[int] = set()
        self._began = False  # all have joined
        self._ended = False

    def run(self) -> None:
        """Serve; return at the end of the job, with all connections closed."""
        try:
            self._run()
        finally:
            self.close()
            self._selector.close()

    def _run(self) -> None:
        clock = Stopwatch()
        while not self._ended and len(self._left) < self._size:
            handle_events(self._selector)
            self._drop_slow_strangers()
            if self._end_together and clock.seconds() > self._timeout and len(self._lifelines) < self._size:
                absent = ranks_of([rank for rank in range(self._size) if rank not in self._lifelines], self._size)
                self._end(
                    1,
                    f"{absent} did not join within {self._timeout:g} s; see the output of those processes, and whether "
                    "their hosts reach that of rank 0",
                )
            if os.getppid() != self._parent:
                self._gone(0)

    def _refusal(self, link: Link, size: int) -> str:
        links = self._clients if link.purpose == FOR_KEYS else self._lifelines
        name = f"rank {link.rank} on {link.host} (pid {link.pid})"
        if size != self._size:
            return f"{name} expects {size} ranks, rank 0 expects {self._size}"
        if link.rank >= size or link.rank in links:
            other = self._names.get(link.rank, f"there are {size} ranks")
            return f"{name} is not the only one of that rank: {other}"
        self._names[link.rank] = name
        return ""

    def _admitted(self, link: Link) -> None:
        if link.purpose == FOR_KEYS:
            super()._admitted(link)
            return
        self._lifelines[link.rank] = link
        if len(self._lifelines) == self._size:
            self._began = True
            for lifeline in self._lifelines.values():
                say(lifeline.socket, "go")

    def _lost(self, link: Link) -> None:
        if link.purpose == FOR_KEYS:
            super()._lost(link)
            if not self._end_together:
                self._left.add(link.rank)
            return
        self._gone(link.rank, unreachable=link.unreachable)

    def _out_of_files(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._end(1, f"the server of rank 0 may open {limit} files, too few for {self._size} ranks; raise ulimit -n")

    def _gone(self, rank: int, *, unreachable: bool = False) -> None:
        if rank not in self._left:
            kind, how = ("lost", _UNREACHABLE) if unreachable else ("end", _ENDED)
            self._end(1, f"{self._names.get(rank, f'rank {rank}')} {how}", but=rank, kind=kind)

    def _end(self, code: int, text: str, but: int = -1, kind: str = "end") -> None:
        """Notify all ranks but one that the job has failed, and why: the ranks may be killed before they can.

        While ranks join, the first of them says why.
        """
        if not self._ended:
            self._ended = True
            if text:
                self.fail(text)
            others = [rank for rank in sorted(self._lifelines) if rank != but]
            if text and self._began:
                with contextlib.suppress(OSError):  # its reader has ended
                    os.write(2, f"{text}\n".encode())
            speaker = -1 if self._began else min(others, default=-1)
            for rank in others:
                say(self._lifelines[rank].socket, f"{kind} {code} {speaker} {text}")

    def _serve(self, link: Link, line: str) -> None:
        if self._ended:
            return
        if line == "left":
            self._left.add(link.rank)
        elif line.startswith("end "):
            self._end(_exit_code(line[4:]), "", but=link.rank)


def _exit_code(digits: str) -> int:
    return int(digits) & 0xFF or 1 if digits.isascii() and digits.isdigit() else 1


def main() -> None:
    """Serve with the arguments that `distopt.launch.end_together.lifeline.start_server` has passed to this program."""
    fd, size, timeout, parent, end_together = sys.argv[1:]
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # two connections for each rank
    # The job's launcher may signal all of its processes; this one ends with rank 0.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    key = sys.stdin.buffer.read()
    Server(
        socket.socket(fileno=int(fd)), key, int(size), float(timeout), int(parent), end_together=end_together == "1"
    ).run()
