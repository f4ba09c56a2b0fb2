"""Hosts far apart, on one machine: between network namespaces, a program of ours adds delay, a limit of rate, and loss.

The program, relay.c beside this file, joins a tun device in each of them, so the kernel need not have netem. It is
compiled each time, into a temporary folder. Needs root, iproute2, a C compiler and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distopt.cli.values import positive

from .emulation import LINK, Host, HostsUnavailableError, bring_up, namespaces, require_tools

SOURCE = Path(__file__).with_name("relay.c")
DEVICE = Path("/dev/net/tun")
MOST_HOSTS = 8
# Bytes of a packet of TCP over IPv4 with time stamps, headers included, and those of data in it.
PACKET_BYTES, DATA_BYTES = 1500, 1448
_QUEUE_SECONDS = 0.2  # how much a host may have in its queue, at its rate
_LEAST_QUEUE_BYTES = 16 * PACKET_BYTES


@dataclass(frozen=True)
class Link:
    """The network between any two hosts.

    Attributes:
        round_trip: delay there and back, in seconds.
        rate: bytes per second that a host sends at most, to all others together; headers count.
        loss: share of the packets that are lost.
        seed: determines which.
    """

    round_trip: float
    rate: float
    loss: float = 0.0
    seed: int = 1

    @property
    def delay(self) -> float:
        """Seconds in one direction."""
        return self.round_trip / 2

    @property
    def queue_bytes(self) -> int:
        """Length of the queue of a host; what it does not hold is lost."""
        return max(int(self.rate * _QUEUE_SECONDS), _LEAST_QUEUE_BYTES)

    @property
    def numbers(self) -> tuple[float, ...]:
        """In the order in which the relay takes them."""
        return self.delay, self.rate, self.queue_bytes, self.loss, self.seed

    def __str__(self) -> str:
        lost = f", {self.loss * 100:.3g} % of packets lost" if self.loss else ""
        return f"{self.round_trip * 1e3:g} ms there and back, {self.rate * 8e-6:g} Mbit/s from each host{lost}"


@contextmanager
def far_hosts(count: int, link: Link, mark: str = "") -> Iterator[tuple[Host, ...]]:
    """Make `count` hosts with `link` between any two of them, and remove them at the end, whatever happens.

    Args:
        count: number of hosts, 2 to 8.
        link: the network between any two of them.
        mark: tells the hosts from others that this process has at the same time.

    Raises:
        HostsUnavailableError: it needs root, the commands ip, unshare and cc, and /dev/net/tun.
    """
    if not 2 <= count <= MOST_HOSTS:
        raise ValueError(f"{count} hosts: from 2 to {MOST_HOSTS} can be emulated")
    require_tools("ip", "unshare", "cc")
    try:
        DEVICE.open("r+b", buffering=0).close()
    except OSError as error:
        raise HostsUnavailableError(f"no tun devices: {DEVICE}: {error.strerror}; modprobe tun may help") from error
    with tempfile.TemporaryDirectory(prefix="distopt-relay-") as folder, namespaces(count, mark) as hosts:
        command = [str(_compile(Path(folder))), LINK, *map(str, link.numbers)]
        command += [f"{host.namespace}={host.address}" for host in hosts]
        pipe = subprocess.PIPE
        # In a session of its own: Ctrl-C is not meant for it. It also ends when its input does, as this process ends.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as relay:
            try:
                if relay.stdout.readline() != b"ready\n":
                    raise HostsUnavailableError("the relay between the hosts has failed; its error is above")
                bring_up(hosts)
                yield hosts
            finally:
                relay.kill()


def _compile(folder: Path) -> Path:
    program = folder / "relay"
    command = ["cc", "-O2", "-std=c11", "-o", str(program), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsUnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")
    return program


def number_of_hosts(text: str) -> int:
    """A number of hosts that can be emulated, as a type of argparse."""
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= MOST_HOSTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts from 2 to {MOST_HOSTS}")
    return int(text)


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a link."""
    parser.add_argument("--delay", type=_not_negative, default=40.0, metavar="MS", help="there and back (40)")
    parser.add_argument("--rate", type=positive, default=100.0, metavar="MBIT_S", help="of what each host sends (100)")
    parser.add_argument("--loss", type=_per_cent, default=0.0, metavar="PERCENT", help="of packets, at random (0)")


def link_of(args: argparse.Namespace) -> Link:
    """The link that the options of `add_link` describe."""
    return Link(args.delay * 1e-3, args.rate * 1e6 / 8, args.loss / 100)


def _not_negative(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


def _per_cent(text: str) -> float:
    value = _not_negative(text)
    if value >= 100:
        raise argparse.ArgumentTypeError(f"{text!r} per cent leave no packet")
    return value
