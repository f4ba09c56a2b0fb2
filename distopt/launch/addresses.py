"""The addresses of this host."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

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
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, _ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in found if not address.startswith("127.")]
