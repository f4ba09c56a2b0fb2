"""Connects ranks on several hosts for MPICH, where no MPI launcher does: see `distopt.launch.pmi_server`."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError
from . import pmi_server
from .env import RUN
from .pmi_server import HELLO, NONCE_BYTES, PROOF_BYTES, REASON, keep_alive, proof

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .env import LauncherInfo
    from .meeting import Meeting

__all__ = ["Member", "introduce", "listen", "ports"]

_CONNECT_SECONDS = 2.0
# Ranks wait this much longer than the server, which can say who is missing.
_GRACE_SECONDS = 5.0
# The end of the connection may be seen this much before MPI_Finalize returns.
_FINALIZED_SECONDS = 0.3
# Within which the agents of `distopt run` end all ranks when one has failed.
_AGENTS_SECONDS = 3.0
# Below the ports that Linux gives to outgoing connections (32768 and above), above those of services.
_FIRST_PORT, _N_PORTS, _N_CANDIDATES = 20_000, 12_000, 8

_servers: list[subprocess.Popen[bytes]] = []  # kept: Popen complains about a running process that nobody holds


class Member:
    """A rank's connections to the key-value server of its job; rank 0 starts the server.

    Collective.

    Args:
        info: the launcher's view of this process.
        place: how the ranks meet.
        timeout: seconds within which all ranks must join.

    Attributes:
        watch: the connection that tells of the end of the job; becomes readable then.

    Raises:
        LaunchError: rank 0 cannot be reached, refused this rank, or has missed others.
    """

    def __init__(self, info: LauncherInfo, place: Meeting, timeout: float) -> None:
        self._info = info
        self._place = place
        self._who = f"rank {info.rank} of {info.size} on {socket.gethostname()} (pid {os.getpid()})"
        until = time.monotonic() + timeout
        self._address = place.address
        if info.rank == 0:
            self._serve(timeout)
            self._address = "localhost"
        with contextlib.ExitStack() as stack:
            self.watch = stack.enter_context(self._connect(b"w", until))
            self._mpi = stack.enter_context(self._connect(b"m", until))
            self.watch.settimeout(timeout + _GRACE_SECONDS)
            self._wait_for_all()
            stack.pop_all()

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Local. The variables that lead MPI_Init to the server; processes started later shall not inherit them."""
        self._mpi.settimeout(None)
        variables = {
            "PMI_FD": str(self._mpi.detach()),  # MPICH closes it
            "PMI_RANK": str(self._info.rank),
            "PMI_SIZE": str(self._info.size),
            "MPIR_CVAR_PMI_VERSION": "1",  # also where srun offers another
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def end_with_others(self) -> None:
        """Local. From now on, end this process as soon as another rank fails or ends before MPI_Finalize."""
        self.watch.settimeout(None)
        threading.Thread(target=self._outlive, name="distopt job", daemon=True).start()

    # -- connections -----------------------------------------------------------------------------------------------
    def _serve(self, timeout: float) -> None:
        with self._listen() as listener:
            program = [sys.executable, "-I", "-S", str(Path(pmi_server.__file__))]
            numbers = [str(x) for x in (listener.fileno(), self._info.size, timeout, os.getpid())]
            quiet = subprocess.DEVNULL
            server = subprocess.Popen(
                [*program, *numbers], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=(listener.fileno(),)
            )
        _servers.append(server)
        if server.stdin is not None:
            server.stdin.write(self._place.key)
            server.stdin.close()

    def _listen(self) -> socket.socket:
        for port in ports(self._place.key):
            with contextlib.suppress(OSError):
                return listen(port, 2 * self._info.size + 16)
        tried = ", ".join(map(str, ports(self._place.key)))
        raise LaunchError(f"{self._who} cannot listen for the other ranks: the ports {tried} are taken; free one")

    def _connect(self, purpose: bytes, until: float) -> socket.socket:
        while True:
            for port in ports(self._place.key):
                link = None
                try:
                    link = socket.create_connection((self._address, port), timeout=_CONNECT_SECONDS)
                    keep_alive(link)
                    reason = introduce(link, self._place.key, purpose, self._info.rank, self._info.size)
                    if reason:
                        raise LaunchError(
                            f"rank 0 refused this rank: {reason}; check the variables that the launcher set"
                        )
                except socket.gaierror as error:
                    raise LaunchError(
                        f"{self._who} cannot find the host of rank 0 ({self._place.source}): {error.strerror}; give an "
                        "address that all hosts can reach"
                    ) from None
                except (OSError, struct.error):  # nobody listens yet, or something else does
                    if link is not None:
                        link.close()
                except BaseException:
                    if link is not None:
                        link.close()
                    raise
                else:
                    return link
            if time.monotonic() > until:
                tried = ", ".join(map(str, ports(self._place.key)))
                raise LaunchError(
                    f"{self._who} found no rank 0 at {self._address} ({self._place.source}), TCP ports {tried}; see "
                    "rank 0's output, and whether a firewall separates the hosts"
                )
            time.sleep(0.05)

    def _wait_for_all(self) -> None:
        try:
            line = self._read_line()
        except TimeoutError:
            line = None
        if line is None:
            raise LaunchError(f"{self._who} has lost rank 0 while the ranks were joining; see the output of rank 0")
        if line != "go":
            _, _, text = line.split(" ", 2)
            raise LaunchError(text or "another rank has failed while the ranks were joining; see the output")

    def _read_line(self) -> str | None:
        """The server's next message; None at the end of the connection."""
        line = bytearray()
        while True:
            try:
                byte = self.watch.recv(1)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not byte:
                return None
            if byte == b"\n":
                return line.decode(errors="replace")
            line += byte

    def _outlive(self) -> None:
        line = self._read_line()
        if line is None:  # also when all ranks have finalized MPI
            from mpi4py import MPI

            time.sleep(_FINALIZED_SECONDS)
            if MPI.Is_finalized():
                return
            line = f"end 1 {self._who} has lost rank 0, which has ended or cannot be reached; see its output"
        if self._info.name == RUN:  # its agents know which rank was the first, and end the others
            time.sleep(_AGENTS_SECONDS)
        _, code, text = line.split(" ", 2)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            if text:
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        os._exit(int(code))


def listen(port: int, backlog: int) -> socket.socket:
    """Local. A TCP socket that listens at this port of all addresses of the host; raises OSError if it is taken."""
    family = socket.AF_INET6 if (dual := socket.has_dualstack_ipv6()) else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def introduce(link: socket.socket, key: bytes, purpose: bytes, rank: int, size: int) -> str:
    """Local. Prove to the `Gate` at the other end that this process knows the key, and make it prove the same.

    Returns:
        Why the gate refuses this process; empty if it does not.

    Raises:
        ConnectionError, TimeoutError: the other end does not know the key, does not believe this one, or is no gate.
    """
    theirs = _receive(link, NONCE_BYTES)
    own = os.urandom(NONCE_BYTES)
    host = socket.gethostname().encode()[:64]
    said = HELLO.pack(own, purpose, rank, size, host, os.getpid(), b"")[:-PROOF_BYTES]
    link.sendall(said + proof(key, b"join", theirs, said))
    answer = _receive(link, PROOF_BYTES)
    if not hmac.compare_digest(answer, proof(key, b"accept", own, theirs)):
        raise ConnectionError("not of this job")
    (length,) = REASON.unpack(_receive(link, REASON.size))
    return _receive(link, length).decode(errors="replace")


def ports(key: bytes) -> list[int]:
    """Local. The TCP ports that may serve the job with this key; rank 0 takes the first that is free."""
    numbers = struct.unpack(f"!{_N_CANDIDATES}I", hashlib.sha256(b"distopt ports " + key).digest()[: 4 * _N_CANDIDATES])
    return [_FIRST_PORT + number % _N_PORTS for number in numbers]


def _receive(link: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = link.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        received += part
    return received
