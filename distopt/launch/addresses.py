"""The addresses of this host, and a free port of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from ..errors import LaunchError
from .sockets import listen_at_one_of

LOOPBACK = "127.0.0.1"  # "localhost" is a name, which the resolver of a bare container does not know
PORTS_TAKEN = "all of DISTOPT_PORTS are taken; free one, or give a wider range"

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


def is_own(host: str) -> bool:
    """Whether this host has the address, or the name, `host`."""
    with contextlib.suppress(OSError):  # the host is unknown, and the connection will report that
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:  # another host's
                probe.bind(address)
                return True
    return False


def own_addresses() -> list[str]:
    """Addresses of this host's network interfaces, except the loopback, in the order of the kernel."""
    return [address for _, address in own_interfaces()]


def own_interfaces() -> list[tuple[str, str]]:
    """Name and address of this host's network interfaces, except the loopback, in the order of the kernel."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return [(name, address) for name, address in found if not address.startswith("127.")]


def named_interface() -> str:
    """The network interface that GLOO_SOCKET_IFNAME names, the first of several; empty without that variable."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def route_to(host: str) -> str:
    """This host's address on the route to `host`; empty without a route, or with the loopback only."""
    with contextlib.suppress(OSError, UnicodeError):  # no host has this name
        for family, kind, _, _, place in socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:  # without a route
                probe.connect(place)
                address = str(probe.getsockname()[0])
                if not address.startswith("127.") and address != "::1":
                    return address
    return ""


def listen_somewhere(ports: range | None, backlog: int) -> socket.socket:
    """As `listen`, at a free port; if some are given, at the last of these: ranks and their server begin at the first.

    Raises:
        LaunchError: all of them are taken.
    """
    listener = listen_at_one_of((0,) if ports is None else reversed(ports), backlog)
    if listener is None:
        raise LaunchError(PORTS_TAKEN)
    return listener
