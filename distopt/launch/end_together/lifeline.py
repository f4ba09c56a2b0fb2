"""Ranks end together: each is connected to the server of its job, `distopt.launch.end_together.server`.

The launcher may be slow to notice that a rank has ended or a host cannot be reached, or never notice it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import LaunchError
from ...recorder.flight import flight_record
from ..gate import FOR_KEYS, FOR_LIFELINE, LONGEST_CALL_SECONDS, RefusedError, call
from ..mpi_quirks import end_waiting_daemon
from ..sockets import close_in_children, say
from ..stopwatch import Stopwatch
from ..words import this_rank
from .report import supervisor

_RETRY_SECONDS = 0.01  # pause before the next call of a server that was absent
# Then MPI_Finalize has not returned, and the end of the connection is a failure.
_FINALIZED_SECONDS = 0.3

# When a process ends, Linux closes the highest descriptors first. The server must notice the end before other ranks
# notice it through MPI: that may crash them at once.
_HIGH = 512

_servers: list[subprocess.Popen[bytes]] = []  # that may run

# The server needs a few modules of `distopt.launch`, and neither the rest of distopt nor its imports.
_PROGRAM = """
import sys, types
package = sys.modules["launch"] = types.ModuleType("launch")
package.__path__ = [sys.argv.pop(1)]
from launch.end_together.server import main
main()
"""


@atexit.register
def _leave_servers() -> None:
    for server in _servers:
        server.returncode = 0  # they may outlive this process; Python would warn of that


def start_server(
    listener: socket.socket, key: bytes, size: int, timeout: float, *, speaks: bool = True, end_together: bool = True
) -> subprocess.Popen[bytes]:
    """Start the server of a job of `size` ranks, as rank 0.

    Args:
        listener: a listening socket; the caller closes it.
        key: 32 bytes that only the job's ranks know.
        size: number of ranks.
        timeout: seconds that the ranks have to join.
        speaks: whether it says on stderr why the job has failed.
        end_together: whether the ranks end together; else it serves their values only.

    Raises:
        OSError: no process can be started.
    """
    program = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(__file__).parents[1])]
    numbers = [str(x) for x in (listener.fileno(), size, timeout, os.getpid(), int(end_together))]
    server = subprocess.Popen(
        [*program, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if speaks else subprocess.DEVNULL,
        pass_fds=(listener.fileno(),),
        start_new_session=True,  # a launcher kills the ranks' process groups; the server still has to say why
    )
    _servers[:] = [*(other for other in _servers if other.poll() is None), server]
    if server.stdin is not None:
        server.stdin.write(key)
        server.stdin.close()
    return server


def reach(
    addresses: Sequence[tuple[str, int]],
    key: bytes,
    purpose: bytes,
    rank: int,
    size: int,
    timeout: float,
    source: str,
) -> socket.socket:
    """A connection to the server of a job, which may listen at one of several addresses.

    Args:
        addresses: hosts and ports.
        key: the job's key.
        purpose: of the connection.
        rank: of this process.
        size: number of ranks.
        timeout: seconds to try.
        source: where the addresses come from, for messages.

    Raises:
        LaunchError: the server cannot be reached, or refused this rank.
    """
    clock, who = Stopwatch(LONGEST_CALL_SECONDS), this_rank(rank, size)
    while True:
        for address in addresses:
            try:
                return call(address, key, purpose, rank, size, clock)
            except RefusedError as error:  # noqa: PERF203
                raise LaunchError(
                    f"rank 0 refused this rank: {error}; check the variables that the launcher set"
                ) from None
            except socket.gaierror as error:
                raise LaunchError(
                    f"{who} cannot find the host of rank 0 ({source}): {error.strerror}; give an "
                    "address that all hosts can reach"
                ) from None
            except OSError:  # no process listens yet, or another program does
                pass
        if clock.seconds() > timeout:
            hosts = ", ".join(dict.fromkeys(host for host, _ in addresses))
            tried = ", ".join(str(port) for port in dict.fromkeys(port for _, port in addresses))
            raise LaunchError(
                f"{who} found no rank 0 at {hosts} ({source}), TCP ports {tried}; see "
                "rank 0's output, and whether a firewall separates the hosts"
            )
        time.sleep(_RETRY_SECONDS)


class Lifeline:
    """A rank's connection to the server of its job.

    Args:
        rank: number of this process in the job.
        size: number of ranks.
        key: 32 bytes that only the job's ranks know.
        addresses: where the server may be: host and TCP port.
        timeout: seconds that an attempt to connect lasts.
        source: where the addresses come from, for messages.
        speaks: whether this rank reports the loss of rank 0, and ends the processes that wait; one per host is enough.

    Attributes:
        speaks: the argument.

    Raises:
        LaunchError: rank 0 cannot be reached, or refused this rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        key: bytes,
        addresses: Sequence[tuple[str, int]],
        timeout: float,
        *,
        source: str = "",
        speaks: bool = True,
    ) -> None:
        self._rank = rank
        self._size = size
        self._key = key
        self._addresses = addresses
        self._source = source
        self.speaks = speaks
        self._left = False
        self._patience = 0.0  # seconds from the failure of another rank to the end of this process
        self._who = this_rank(rank, size)
        self._link = self._connect(FOR_LIFELINE, timeout)
        with contextlib.suppress(OSError):  # the limit is lower
            descriptor = fcntl.fcntl(self._link, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            self._link.close()
            self._link = socket.socket(fileno=descriptor)
        self._has_client = False
        close_in_children(self._link)

    def fileno(self) -> int:
        """The connection's descriptor, which becomes readable when the job fails."""
        return self._link.fileno()

    def client_link(self, timeout: float) -> socket.socket | None:
        """A connection of this rank for the server's values; None if it has had one before.

        Raises:
            LaunchError: the server cannot be reached.
        """
        before, self._has_client = self._has_client, True
        return None if before else self._connect(FOR_KEYS, timeout)

    def end_with_others(self, abort: Callable[[int], object] = os._exit) -> None:
        """From now on, end this process as soon as another rank fails or ends before it has left.

        Args:
            abort: called with the exit code if a host cannot be reached, so that its launcher does not wait for it.
        """
        self._abort = abort
        self._link.settimeout(None)
        threading.Thread(target=self._outlive, name="distopt job", daemon=True).start()

    def leave(self) -> None:
        """This rank has done its part: its end is not a failure, and failures of others no longer concern it."""
        self._left = True
        say(self._link, "left")

    def end_others(self, code: int) -> None:
        """End the other ranks with this exit code, after this rank has reported its failure."""
        say(self._link, f"end {code}")

    def close(self) -> None:
        """Close the connection; a rank that has not called `leave` counts as lost."""
        self._link.close()

    # -- connection ------------------------------------------------------------------------------------------------
    def _connect(self, purpose: bytes, timeout: float) -> socket.socket:
        return reach(self._addresses, self._key, purpose, self._rank, self._size, timeout, self._source)

    def _read_line(self) -> str:
        """The server's next message.

        Raises:
            OSError: the server has ended (ConnectionError), or cannot be reached.
        """
        line = bytearray()
        while (byte := self._link.recv(1)) != b"\n":
            if not byte:
                raise ConnectionResetError("the other end closed the connection")
            line += byte
        return line.decode(errors="replace")

    def _outlive(self) -> None:
        try:
            while (line := self._read_line()) == "go":
                pass
        except OSError as error:  # the regular end, too, after all ranks have left
            time.sleep(_FINALIZED_SECONDS)
            MPI = sys.modules.get("mpi4py.MPI")
            if MPI is not None and MPI.Is_finalized():
                return
            kind, how = "end", "has ended; see its output"
            if not isinstance(error, ConnectionError):
                kind, how = "lost", "cannot be reached; see whether its host and the network are up"
            lost = "rank 0, which" if self._rank else "the helper process that watches the ranks, which"
            line = f"{kind} 1 {self._rank if self.speaks else -1} {self._who} has lost {lost} {how}"
        if self._left:
            return
        kind, code, speaker, text = line.split(" ", 3)
        flight_record.write(text)
        supervisor.report_failure(int(code), text or "another rank has failed", is_consequence=True)
        with contextlib.suppress(Exception):  # the script may have replaced the streams; this process ends in any case
            sys.stdout.flush()
            if text and int(speaker) == self._rank:
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        time.sleep(self._patience)
        if kind == "lost":
            if self.speaks:
                end_waiting_daemon()
            self._abort(int(code))
        os._exit(int(code))  # not by MPI_Abort, which other ranks call at this moment: see `mpi_quirks`
