"""Sockets of one process that serves several at a time: deadlines, lines, the other end, and the wait for events.

This module needs little of the standard library, so that a server can start at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from .stopwatch import SLICE_SECONDS, Deadline

_LOOK_SECONDS = 0.2  # a supervisor looks for ended processes and timeouts at least that often
_LISTEN_SECONDS, _LISTEN_LOOKS = 1.0, 100  # then a process that has taken an address is not about to listen there
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# A host that is switched off or unplugged does not end its connections. That is noticed 5 to 7 s later.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 5))
_USER_TIMEOUT_MS = 7000

T = TypeVar("T")
_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def in_slices(link: socket.socket, deadline: Deadline, operation: Callable[[], T]) -> T:
    """The result of an operation on `link`, repeated until it succeeds or the deadline has passed.

    Raises:
        TimeoutError: it has passed.
    """
    while True:
        link.settimeout(min(SLICE_SECONDS, deadline.left()))
        with contextlib.suppress(TimeoutError):  # this slice has passed, and perhaps not the deadline
            return operation()


def receive_exactly(link: socket.socket, count: int, deadline: Deadline) -> bytes:
    """The next `count` bytes.

    Raises:
        OSError: the other end has closed the link, or sent less in time.
    """
    parts = bytearray()
    while len(parts) < count:
        part = in_slices(link, deadline, partial(link.recv, count - len(parts)))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        parts += part
    return bytes(parts)


def listen(port: int, backlog: int) -> socket.socket:
    """A TCP socket that listens at this port of all addresses of the host; raises OSError if it is taken."""
    family = socket.AF_INET6 if (dual := socket.has_dualstack_ipv6()) else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def listen_at_one_of(ports: Iterable[int], backlog: int) -> socket.socket | None:
    """As `listen`, at the first of these ports that is free; None if all are taken."""
    for port in ports:
        with contextlib.suppress(OSError):
            return listen(port, backlog)
    return None


def is_free(port: int) -> bool:
    """Whether no socket of this host has the TCP port."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as probe, contextlib.suppress(OSError):
        if dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("", port))
        return True
    return False


def listener_of(name: str) -> int | None:
    """The user id that listens at an abstract Unix address that is taken; None if no process does.

    A process that has just taken the address may be about to listen, so this waits for it.
    """
    for _ in range(_LISTEN_LOOKS):
        with (
            socket.socket(socket.AF_UNIX) as probe,
            contextlib.suppress(OSError),
        ):  # none listens yet, or its queue is full
            probe.setblocking(False)
            probe.connect(name)
            return peer_of(probe)[1]
        time.sleep(_LISTEN_SECONDS / _LISTEN_LOOKS)
    return None


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as reported by the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def keep_alive(link: socket.socket) -> None:
    """Have the kernel notice within 7 s that the other end's host cannot be reached."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS), (socket.TCP_NODELAY, 1)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def close_in_children(link: socket.socket) -> None:
    """Have forked children close this socket: they would hold it open after the end of this process."""
    _of_this_process.add(link)


def _close_all() -> None:
    for link in list(_of_this_process):
        link.close()


os.register_at_fork(after_in_child=_close_all)


def say(link: socket.socket, line: str) -> None:
    """Send a line, if the other end is there: its end is noticed when `link` is read."""
    with contextlib.suppress(OSError):  # it has ended, or reads nothing
        link.sendall(f"{line}\n".encode())


def handle_events(selector: selectors.BaseSelector, seconds: float = _LOOK_SECONDS) -> None:
    """Wait for events, and call the function registered with each; `seconds` at most."""
    for key, _ in selector.select(seconds):
        if selector.get_map().get(key.fd) == key:  # an earlier event of this round may have unregistered it
            key.data()
