"""Hosts on one machine: network namespaces with a host name each; here two that a cable joins. `far` has distant ones.

For benchmarks and tests of programs that run on several hosts. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from distopt.errors import DistoptError, MissingDependencyError, pip_install

LINK = "wire"  # name of the interface in both namespaces
# Rates of `Host.shape`, as tc writes them, and how much its token bucket lets pass unshaped after a pause: no more than
# the rate needs.
RATES = {"10gbit": "2mb", "1gbit": "256kb", "100mbit": "16kb", "10mbit": "4kb"}
# Ranks yield, for each host takes all cores for its own.
_OPEN_MPI = (
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "OMPI_MCA_pml=ob1",
    "OMPI_MCA_btl=self,sm,tcp",
    "OMPI_MCA_mpi_yield_when_idle=1",
    f"OMPI_MCA_btl_tcp_if_include={LINK}",
)
_NOWHERE = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", LINK)


class HostsUnavailableError(DistoptError):
    """This machine or this user cannot make the hosts; says why."""


@dataclass(frozen=True)
class Host:
    """An emulated host."""

    name: str
    address: str
    namespace: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """`command` as a process of this host, with its name."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh", *command]

    def cut(self, peer: Host, *, silently: bool) -> None:
        """Let nothing reach `peer` any more: the interface goes down, or `silently` what it sends is lost."""
        if silently:  # addressed to a card that no host has
            _ip("-n", self.namespace, "neighbor", "replace", peer.address, *_NOWHERE)
        else:
            _ip("-n", self.namespace, "link", "set", LINK, "down")

    def mend(self) -> None:
        """Undo `cut` at this host."""
        _ip("-n", self.namespace, "neighbor", "flush", "nud", "permanent", "dev", LINK)
        _ip("-n", self.namespace, "link", "set", LINK, "up")

    def shape(self, rate: str) -> None:
        """Limit what the host sends, by a token bucket, to one of `RATES`."""
        tbf = ["root", "tbf", "rate", rate, "burst", RATES[rate], "latency", "100ms"]
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "replace", "dev", LINK, *tbf], check=True)


@dataclass(frozen=True)
class TwoHosts:
    """The hosts, as long as the context that made them is open."""

    hosts: tuple[Host, Host]
    launcher: Path
    is_open_mpi: bool

    def cut(self, *, silently: bool) -> None:
        """Separate the hosts, in both directions; see `Host.cut`."""
        first, second = self.hosts
        for host, peer in ((first, second), (second, first)):
            host.cut(peer, silently=silently)

    def mend(self) -> None:
        """Undo `cut`."""
        for host in self.hosts:
            host.mend()
        wait_for_link(self.hosts)

    def mpiexec(
        self, ranks_per_host: int, command: Sequence[str], program: str = "", *, open_mpi: bool | None = None
    ) -> list[str]:
        """A command that runs `command` on that many ranks of each host, through the cable.

        Args:
            ranks_per_host: number of ranks on each host.
            command: what each of them runs.
            program: the mpiexec (default: that beside this Python).
            open_mpi: whether it is Open MPI's, not MPICH's (default: as that beside this Python).
        """
        program = program or find_mpiexec()[0]
        slots = ",".join(f"{host.address}:{ranks_per_host}" for host in self.hosts)
        if self.is_open_mpi if open_mpi is None else open_mpi:
            words = ["env", *_OPEN_MPI, program, "--prtemca", "plm_ssh_agent", str(self.launcher)]
            words += ["--prtemca", "prte_if_include", LINK, "--host", slots]
            words += ["--map-by", f"ppr:{ranks_per_host}:node:oversubscribe"]
        else:
            words = [program, "-launcher", "ssh", "-launcher-exec", str(self.launcher), "-iface", LINK]
            # The hosts share one kernel, and UCX would find the ways past the wire.
            words += ["-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", LINK, "-hosts", slots]
        return self.hosts[0].inside([*words, "-n", str(2 * ranks_per_host), *command])


@contextmanager
def two_hosts(mark: str = "") -> Iterator[TwoHosts]:
    """Make two hosts, and remove them at the end, whatever happens.

    Args:
        mark: tells the hosts from others that this process has at the same time.

    Raises:
        HostsUnavailableError: it needs root, the commands ip and unshare, and the mpiexec of MPICH or Open MPI.
    """
    require_tools("ip", "unshare", "mpiexec")
    _, version = find_mpiexec()
    if not any(name in version for name in ("HYDRA", "Open MPI")):
        raise HostsUnavailableError("only the mpiexec of MPICH and Open MPI can be led into another namespace")
    with tempfile.TemporaryDirectory() as folder, near_hosts(2, mark) as (first, second):
        launcher = Path(folder) / "launcher"
        launcher.write_text(_launcher_script((first, second)))
        launcher.chmod(0o700)
        yield TwoHosts((first, second), launcher, "Open MPI" in version)


@contextmanager
def near_hosts(count: int, mark: str = "") -> Iterator[tuple[Host, ...]]:
    """Make `count` hosts that a cable joins, or a switch if they are more than two, and remove them at the end.

    Args:
        count: number of hosts, 26 at most.
        mark: see `two_hosts`.
    """
    with namespaces(count, mark) as hosts, ExitStack() as stack:
        if count == 2:
            _join(hosts[0], hosts[1].namespace, LINK)
        else:
            (switch,) = stack.enter_context(namespaces(1, f"{mark}-switch"))
            inside = ("-n", switch.namespace, "link")
            _ip(*inside, "add", "switch", "up", "type", "bridge")
            for i, host in enumerate(hosts):
                _join(host, switch.namespace, f"port{i}")
                _ip(*inside, "set", f"port{i}", "up", "master", "switch")
        bring_up(hosts)
        wait_for_link(hosts)
        yield hosts


def require_tools(*tools: str) -> None:
    """Local. Raise a HostsUnavailableError if this is not root, or one of these commands is missing."""
    if os.geteuid() != 0:
        raise HostsUnavailableError("network namespaces are root's to make; run this as root")
    for tool in tools:
        if shutil.which(tool) is None and not Path(sys.executable).with_name(tool).exists():
            raise HostsUnavailableError(f"there is no command {tool!r}")


@contextmanager
def namespaces(count: int, mark: str = "") -> Iterator[tuple[Host, ...]]:
    """Make `count` hosts, 26 at most, without an interface, and remove them at the end, with all interfaces.

    Args:
        count: number of hosts.
        mark: see `two_hosts`.
    """
    name = f"distopt-{os.getpid()}{mark}"
    letters = enumerate(ascii_lowercase[:count], 1)
    hosts = tuple(Host(f"distopt-{x}", f"10.213.77.{i}", f"{name}-{x}") for i, x in letters)
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, stderr=subprocess.DEVNULL)


def _join(host: Host, namespace: str, device: str) -> None:
    """Make a cable from `LINK` of the host to a device of that namespace."""
    _ip("link", "add", LINK, "netns", host.namespace, "type", "veth", "peer", "name", device, "netns", namespace)


def bring_up(hosts: Sequence[Host]) -> None:
    """Give `LINK` of each host its address, and bring all interfaces up."""
    for host in hosts:
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", LINK)
        for device in ("lo", LINK):
            _ip("-n", host.namespace, "link", "set", device, "up")


def wait_for_link(hosts: Sequence[Host]) -> None:
    """The kernel says a moment later that the link is up; until then UCX does not find the interface."""
    for host in hosts:
        deadline = time.monotonic() + 60.0
        while " state UP " not in _ip("-n", host.namespace, "-oneline", "link", "show", "dev", LINK):
            if time.monotonic() > deadline:
                raise HostsUnavailableError("the link between the namespaces does not come up")
            time.sleep(0.02)


def _ip(*words: str) -> str:
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise HostsUnavailableError(f"ip {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout


def _launcher_script(hosts: Sequence[Host]) -> str:
    """The script that mpiexec calls in place of ssh: [options] address command.

    As with ssh, the command does not end when its caller does, and gets no signal that the caller gets.
    """
    cases = "\n".join(f"  {host.address}) name={host.name} namespace={host.namespace};;" for host in hosts)
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
esac
shift
setsid ip netns exec "$namespace" unshare --uts sh -c "hostname $name && $*" < /dev/null &
wait $!
"""


def find_mpiexec() -> tuple[str, str]:
    """The mpiexec most likely to belong to this environment's mpi4py, and what it says of its version.

    Raises:
        MissingDependencyError: there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise MissingDependencyError(f"no mpiexec on the PATH; {pip_install('mpi')}")
    return path, subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
