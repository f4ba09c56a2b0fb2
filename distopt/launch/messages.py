"""Messages between two processes of a host, on a stream socket: bytes, or the reason why there are none."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from functools import partial

from ..errors import LaunchError
from .gate import in_slices, receive_exactly
from .stopwatch import Deadline

_HEADER = struct.Struct("!BI")  # kind, length
_DATA, _ERROR = 0, 1
_MAX_BYTES = 16 << 20
_SENDER_SECONDS = 0.5  # within which the sender of a reason to give up may end


class rank_named(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a statement
    """Turns socket errors into a LaunchError that names the rank."""

    def __init__(self, rank: int, pid: int | None = None) -> None:
        self._name = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise LaunchError(f"{self._name} did not answer in time; see its output") from None
        if isinstance(error, OSError):
            raise LaunchError(f"{self._name} ended while the ranks were setting up; see its output") from error


def send(link: socket.socket, payload: bytes, deadline: Deadline, kind: int = _DATA) -> None:
    """Local. Send a message.

    Raises:
        LaunchError: it is too long.
        OSError: the other end has gone, or did not read it in time.
    """
    if len(payload) > _MAX_BYTES:
        raise LaunchError(
            f"{len(payload)} bytes are too many for the setup of a job; send them through the communicator"
        )
    left = memoryview(_HEADER.pack(kind, len(payload)) + payload)
    while left:
        left = left[in_slices(link, deadline, partial(link.send, left)) :]


def try_to_tell(link: socket.socket, text: str) -> None:
    """Local. Send the reason for which the other end shall give up, if it is still there."""
    with contextlib.suppress(OSError):  # it may also have ended
        send(link, text.encode(), Deadline(1.0), _ERROR)


def receive(link: socket.socket, deadline: Deadline) -> bytes:
    """Local. The next message.

    Raises:
        LaunchError: it is a reason to give up, or no message.
        OSError: the other end has gone, or sent nothing in time.
    """
    kind, length = _HEADER.unpack(receive_exactly(link, _HEADER.size, deadline))
    if length > 2 * _MAX_BYTES or kind not in (_DATA, _ERROR):
        raise LaunchError("a rank sent a message that cannot be read; use the same version of distopt everywhere")
    payload = receive_exactly(link, length, deadline)
    if kind == _ERROR:
        told = LaunchError(payload.decode(errors="replace"))
        told.is_consequence = True
        with contextlib.suppress(OSError):  # the sender fails for this reason, and should be the first to say so
            in_slices(link, Deadline(_SENDER_SECONDS), partial(link.recv, 1))
        raise told
    return payload


def pack(payloads: Sequence[bytes]) -> bytes:
    """Local. Combine the payloads of all ranks into one message."""
    return struct.pack(f"!{len(payloads)}I", *map(len, payloads)) + b"".join(payloads)


def unpack(message: bytes, count: int) -> list[bytes]:
    """Local. The inverse of `pack` for `count` payloads.

    Raises:
        LaunchError: the lengths do not add up.
    """
    at = 4 * count
    if len(message) < at or at + sum(lengths := struct.unpack_from(f"!{count}I", message)) != len(message):
        raise LaunchError("rank 0 sent a message of the wrong length; use the same version everywhere")
    payloads = []
    for length in lengths:
        payloads.append(message[at : at + length])
        at += length
    return payloads
