"""The ranks of several hosts, where no MPI launcher connects them, come to a server: see `end_together.server`."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import subprocess
from functools import partial

from ... import _core
from ...errors import LaunchError
from ...settings import Settings
from ..addresses import LOOPBACK
from ..end_together.lifeline import Lifeline, start_server
from ..gate import CONNECT_SECONDS
from ..launchers import LauncherInfo, launcher_of
from ..sockets import in_slices, listen_at_one_of
from ..stopwatch import GRACE_SECONDS, Deadline
from .meeting import Meeting

# Then a rank ends itself, if the agents of `distopt run` have not ended it after the failure of another.
_AGENTS_SECONDS = 3.0
# Linux gives ports from 32768 on to outgoing connections; services use lower ports than these.
_PORTS, _N_CANDIDATES = range(20_000, 32_000), 8


class Member(Lifeline):
    """A rank's connections to the server of its job; rank 0 starts the server.

    Collective.

    Args:
        info: the launcher's view of this process.
        met: how the ranks meet.
        timeout: seconds that the ranks have to join.

    Raises:
        LaunchError: rank 0 cannot be reached, refused this rank, or has missed others.
    """

    server: subprocess.Popen[bytes] | None = None  # its process, on rank 0

    def __init__(self, info: LauncherInfo, met: Meeting, timeout: float) -> None:
        self._has_agents = launcher_of(info).has_agents
        address = met.address
        if info.rank == 0:
            self._serve(info, met, timeout)
            address = LOOPBACK
        addresses = [(address, port) for port in ports(met.key)]
        # The agents of `distopt run` know which rank failed first, and end the others.
        speaks = not self._has_agents and not info.local_rank
        super().__init__(info.rank, info.size, met.key, addresses, timeout, source=met.source, speaks=speaks)
        self._patience = _AGENTS_SECONDS if self._has_agents else 0.0
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._wait_for_all(Deadline(timeout + GRACE_SECONDS))
            stack.pop_all()
        if self.server is not None:
            # The kernel ends a container, with the server, at the end of its process 1: this one, or its agent.
            _core.exit_after(self.server.pid, self.fileno())

    def _serve(self, info: LauncherInfo, met: Meeting, timeout: float) -> None:
        listener = listen_at_one_of(ports(met.key), 2 * info.size + 16)
        if listener is None:
            tried, allowed = ", ".join(map(str, ports(met.key))), Settings.from_env().ports
            raise LaunchError(
                f"rank 0 of {info.size} cannot listen for the other ranks: the ports {tried} are taken; free one"
                + (", or give a wider range in DISTOPT_PORTS" if allowed else "")
            )
        with listener:
            self.server = start_server(listener, met.key, info.size, timeout, speaks=not self._has_agents)

    def _wait_for_all(self, deadline: Deadline) -> None:
        try:
            in_slices(self._link, deadline, partial(self._link.recv, 1, socket.MSG_PEEK))
            self._link.settimeout(CONNECT_SECONDS)  # for the rest of the line
            line = self._read_line()
        except OSError:
            raise LaunchError(
                f"{self._who} has lost rank 0 while the ranks were joining; see the output of rank 0"
            ) from None
        if line != "go":
            _, _, speaker, text = line.split(" ", 3)
            if int(speaker) != self._rank or not text:
                text = "another rank has failed while the ranks were joining; see the output"
            raise LaunchError(text)


def ports(key: bytes) -> list[int]:
    """The TCP ports that may serve the job with this key, in `DISTOPT_PORTS`; rank 0 takes the first that is free."""
    allowed = Settings.from_env().ports or _PORTS
    numbers = struct.unpack(f"!{_N_CANDIDATES}I", hashlib.sha256(b"distopt ports " + key).digest()[: 4 * _N_CANDIDATES])
    if len(allowed) <= _N_CANDIDATES:
        return [allowed[(numbers[0] + i) % len(allowed)] for i in range(len(allowed))]
    return list(dict.fromkeys(allowed[number % len(allowed)] for number in numbers))
