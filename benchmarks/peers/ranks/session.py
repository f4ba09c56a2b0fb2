"""One JSON object per line, over a socket to the process that runs the benchmark.

On the same machine that is a Unix socket; other hosts connect by TCP, and name a token that they have been given.

A rank that waits for its next request sleeps in the kernel: while one candidate is measured, all others are idle.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any


class Session:
    """The rank's end of the connection."""

    def __init__(self, address: str) -> None:
        """Connect to a Unix socket, given as a path, or by TCP to "TOKEN@HOST:PORT"."""
        token, at, place = address.rpartition("@")
        if at:
            host, _, port = place.rpartition(":")
            self._socket = socket.create_connection((host, int(port)))
            self._socket.sendall(token.encode())
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        self._lines = self._socket.makefile("r")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lines.close()
        self._socket.close()

    def send(self, answer: dict[str, Any]) -> None:
        """Answer a request."""
        self._socket.sendall(json.dumps(answer).encode() + b"\n")

    def requests(self) -> Iterator[dict[str, Any]]:
        """The requests, until the parent closes the connection."""
        for line in self._lines:
            yield json.loads(line)
