"""Two hosts on one machine: network namespaces joined by a cable, each with a host name of its own.

For tests and benchmarks of programs that run on several hosts. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINK = "wire"  # name of the interface in both namespaces


class HostsUnavailableError(Exception):
    """This machine or this user cannot make the hosts; says why."""


@dataclass(frozen=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    namespace: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """`command` as a process of this host, with its name."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh", *command]

    def shape(self, rate: str, burst: str) -> None:
        """Limit what the host sends, by a token bucket; in the words of tc, e.g. "1gbit" and "256kb"."""
        tbf = ["root", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "replace", "dev", LINK, *tbf], check=True)


@dataclass(frozen=True)
class TwoHosts:
    """The hosts, as long as the context that made them is open."""

    hosts: tuple[Host, Host]
    launcher: Path

    def mpiexec(self, ranks_per_host: int, command: Sequence[str]) -> list[str]:
        """A command that runs `command` on that many ranks of each host, under MPICH and through the cable."""
        slots = ",".join(f"{host.address}:{ranks_per_host}" for host in self.hosts)
        program = [_mpiexec(), "-launcher", "ssh", "-launcher-exec", str(self.launcher), "-iface", LINK]
        # The hosts share one kernel, and UCX would find the ways past the wire.
        program += ["-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", LINK]
        return self.hosts[0].inside([*program, "-hosts", slots, "-n", str(2 * ranks_per_host), *command])


@contextmanager
def two_hosts(mark: str = "") -> Iterator[TwoHosts]:
    """Make two hosts, and remove them at the end, whatever happens.

    Args:
        mark: tells the hosts from others that this process has at the same time.

    Raises:
        HostsUnavailableError: it needs root, the commands ip and unshare, and the mpiexec of MPICH.
    """
    if os.geteuid() != 0:
        raise HostsUnavailableError("network namespaces are root's to make")
    for tool in ("ip", "unshare", _mpiexec()):
        if shutil.which(tool) is None:
            raise HostsUnavailableError(f"there is no command {tool!r}")
    if "HYDRA" not in subprocess.run([_mpiexec(), "--version"], capture_output=True, text=True, check=False).stdout:
        raise HostsUnavailableError("only MPICH's mpiexec can be led into another namespace")
    hosts = tuple(
        Host(f"distopt-{x}", f"10.213.77.{i}", f"distopt-{os.getpid()}{mark}-{x}") for i, x in ((1, "a"), (2, "b"))
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            _connect(*hosts)
            launcher = Path(folder) / "launcher"
            launcher.write_text(_launcher_script(hosts))
            launcher.chmod(0o700)
            yield TwoHosts(hosts, launcher)
        finally:
            for host in hosts:  # the cable goes with its ends
                subprocess.run(["ip", "netns", "delete", host.namespace], check=False, stderr=subprocess.DEVNULL)


def _connect(first: Host, second: Host) -> None:
    for host in (first, second):
        _ip("netns", "add", host.namespace)
    peer = ["peer", "name", LINK, "netns", second.namespace]
    _ip("link", "add", LINK, "netns", first.namespace, "type", "veth", *peer)
    for host in (first, second):
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", LINK)
        for device in ("lo", LINK):
            _ip("-n", host.namespace, "link", "set", device, "up")
    # The kernel says so a moment later; until then UCX does not find the interface.
    for host in (first, second):
        deadline = time.monotonic() + 5.0
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
    """What mpiexec calls in place of ssh: [options] address command."""
    cases = "\n".join(f"  {host.address}) name={host.name} namespace={host.namespace};;" for host in hosts)
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
esac
shift
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $name && exec $*"
"""


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"
