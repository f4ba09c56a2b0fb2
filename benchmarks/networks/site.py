"""Where the ranks of a benchmark run, the options that say so, and how they are started there."""

from __future__ import annotations

import argparse
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from distopt.errors import UsageError

from .emulation import LINK, RATES, Host, TwoHosts, two_hosts

BY_MPI = ("mpi", "hierarchical")
BETWEEN_HOSTS = (*BY_MPI, "ucx")  # communicators that reach another host

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
        """The address at which ranks meet without MPI; on one machine, they share a folder instead."""
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
        return _meeting_at(self._first)


class NamespaceSite(Site):
    """The ranks run on emulated hosts, an equal number on each.

    Args:
        hosts: the hosts.
        ranks_per_host: number of ranks on each of them.
    """

    def __init__(self, hosts: Sequence[Host], ranks_per_host: int) -> None:
        super().__init__(len(hosts) * ranks_per_host)
        self.described = f", {ranks_per_host} on each of {len(hosts)} emulated hosts,"
        self._hosts = hosts
        self._ranks_per_host = ranks_per_host

    @property
    def variables(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": LINK}

    def meeting(self) -> dict[str, str]:
        return _meeting_at(self._hosts[0].address)

    def by_hand(self, rank: int, command: Sequence[str]) -> list[str]:
        return self._hosts[rank // self._ranks_per_host].inside(command)


class EmulatedSite(NamespaceSite):
    """The ranks run on two emulated hosts, to which mpiexec finds the way, too.

    Args:
        net: the hosts.
        ranks_per_host: number of ranks on each of them.
        bound: whether mpiexec binds the ranks of a host to a core each, as Slurm does.
    """

    def __init__(self, net: TwoHosts, ranks_per_host: int, *, bound: bool = False) -> None:
        super().__init__(net.hosts, ranks_per_host)
        self._net = net
        self._bound = bound

    def by_mpi(self, mpiexec: str, *, open_mpi: bool) -> list[str]:
        binding = ["--bind-to", "core:overload-allowed"] if open_mpi else ["-bind-to", "core"]
        return self._net.mpiexec(self._ranks_per_host, binding if self._bound else [], mpiexec, open_mpi=open_mpi)


def _meeting_at(host: str) -> dict[str, str]:
    return {"meeting": f"tcp://{host}:{_FIRST_PORT + secrets.randbelow(_N_PORTS)}"}


def add_places(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Add the options; `number` reads the number of ranks on this machine."""
    parser.add_argument("--np", type=number, metavar="N", help="ranks on this machine (default: 2)")
    parser.add_argument("--emulate", type=_hosts, metavar="2xN", help="N ranks in each of two namespaces; as root")
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="the hosts of a hosts file, as mpiexec takes it")
    parser.add_argument("--rate", choices=RATES, help="of the emulated link (default: what the machine gives)")


def is_far(args: argparse.Namespace) -> bool:
    """Local. Whether the ranks are to run on several hosts."""
    return args.emulate is not None or args.hosts is not None


def site_of(args: argparse.Namespace, transports: Sequence[str], stack: ExitStack) -> Site:
    """Where the ranks run, which are to use `transports`.

    Raises:
        UsageError: options contradict each other.
        HostsUnavailableError: hosts cannot be emulated here.
    """
    given = {"--np": args.np, "--emulate": args.emulate, "--hosts": args.hosts}
    places = [option for option, value in given.items() if value is not None]
    if len(places) > 1:
        raise UsageError(f"{' and '.join(places)} contradict each other; give one of them")
    if args.rate is not None and args.emulate is None:
        raise UsageError("--rate is that of the link between emulated hosts; add --emulate 2x1")
    if is_far(args) and (local := [name for name in transports if name not in BETWEEN_HOSTS]):
        raise UsageError(f"--transport {local[0]} does not reach another host; choose {' or '.join(BETWEEN_HOSTS)}")
    if args.hosts is not None:
        return ListedSite(args.hosts)
    if args.emulate is None:
        return Site(args.np or 2)
    net = stack.enter_context(two_hosts())
    for host in net.hosts if args.rate else ():
        host.shape(args.rate)
    return EmulatedSite(net, args.emulate)


def _hosts(text: str) -> int:
    """Ranks on each of two hosts."""
    hosts, _, ranks = text.partition("x")
    if hosts != "2" or not (ranks.isascii() and ranks.isdigit() and int(ranks) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not two hosts; write 2x1, 2x2 or so")
    return int(ranks)
