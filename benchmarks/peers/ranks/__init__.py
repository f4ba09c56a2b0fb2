"""The code that runs inside the ranks of a benchmark.

These files also run in the environments of the peers, where distopt is not installed. They are therefore loaded as a
separate package (`crew.BOOT`), import one another relatively, and need only NumPy and the library under test.

Requests and answers are JSON objects, one a line, over a socket to the process that runs the benchmark: on the same
machine a Unix socket; other hosts connect by TCP, and name a token that they have been given. A rank that waits for its
next request sleeps in the kernel: while one candidate is measured, all others are idle.
"""

from __future__ import annotations

import json
import socket
import sys
from importlib import import_module
from typing import Any


def main(argv: list[str]) -> None:
    """Serve one benchmark as one rank: answer the setup request, then each request for a measurement.

    Args:
        argv: module of this package, whose `prepare` gives the answer to the first request and what answers the others;
            address of the parent's socket, see `connect`; rank (-1 if the launcher sets it); number of ranks.
    """
    module, address, rank, world_size = argv
    with connect(address) as link, link.makefile("r") as lines:

        def send(answer: dict[str, Any]) -> None:
            link.sendall(json.dumps(answer).encode() + b"\n")

        try:
            requests = map(json.loads, lines)
            hello, measure = import_module(f".{module}", __name__).prepare(next(requests), int(rank), int(world_size))
            send(hello)
            for request in requests:
                send(measure(request))
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
            sys.exit(1)


def connect(address: str) -> socket.socket:
    """Connect to a Unix socket, given as a path, or by TCP to "TOKEN@HOST:PORT"."""
    token, at, place = address.rpartition("@")
    if not at:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        return link
    host, _, port = place.rpartition(":")
    link = socket.create_connection((host, int(port)))
    link.sendall(token.encode())
    return link
