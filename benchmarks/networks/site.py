"""Where the ranks of a benchmark run, and how they are started there."""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING

from distopt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["BETWEEN_HOSTS", "ListedSite", "Site"]

BETWEEN_HOSTS = ("mpi", "hierarchical")  # communicators that reach another host

# Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _N_PORTS = 20_000, 12_000
# A line of a hosts file, as MPICH ("node1:8") and Open MPI ("node1 slots=8") write it.
_HOST = re.compile(r"([^\s:#]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?\s*(?:#.*)?")


class Site:
    """All ranks run on this host. Subclasses say otherwise.

    Attributes:
        world_size: number of ranks.
        described: what to say of the place besides their number.
        by_tcp: whether there are ranks that cannot reach this process by a Unix socket.
        hand_started: whether ranks can be started one by one; else mpiexec starts those of all libraries.
    """

    described = ""
    by_tcp = False
    hand_started = True

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the ranks need there."""
        return {}

    def by_mpi(self, mpiexec: str, *, open_mpi: bool) -> list[str]:
        """The words in front of a rank's command with which this mpiexec starts all ranks.

        Open MPI lets them share cores only with --oversubscribe.
        """
        crowded = open_mpi and self.world_size > len(os.sched_getaffinity(0))
        return [mpiexec, *(["--oversubscribe"] if crowded else []), "-n", str(self.world_size)]

    def by_hand(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` as one rank, without MPI."""
        return list(command)

    def meeting(self) -> dict[str, str]:
        """What tells ranks that meet without MPI where they do, besides the folder that those of one machine share."""
        return {}


class ListedSite(Site):
    """The ranks run where a hosts file says.

    Args:
        file: the hosts file, in the words of the mpiexec that is used.

    Raises:
        UsageError: it cannot be read, or lists fewer than two ranks.
    """

    by_tcp = True
    hand_started = False

    def __init__(self, file: Path) -> None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        found: dict[str, int] = {}
        for line in [line for line in lines if line and not line.startswith("#")]:
            if (match := _HOST.fullmatch(line)) is None:
                raise UsageError(f"{file}: {line!r} is neither HOST:RANKS nor HOST slots=RANKS")
            found[match[1]] = found.get(match[1], 0) + int(match[2] or match[3] or 1)
        if sum(found.values()) < 2:
            raise UsageError(f"{file} lists {sum(found.values())} ranks; at least 2 are needed")
        super().__init__(sum(found.values()))
        self.described = " (" + ", ".join(f"{count} on {host}" for host, count in found.items()) + ")"
        self._first = next(iter(found))
        self._file = file.absolute()

    def by_mpi(self, mpiexec: str, *, open_mpi: bool) -> list[str]:
        return [mpiexec, "--hostfile", str(self._file), "-n", str(self.world_size)]

    def meeting(self) -> dict[str, str]:
        return {"meeting": f"tcp://{self._first}:{_FIRST_PORT + secrets.randbelow(_N_PORTS)}"}
