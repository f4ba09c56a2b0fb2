"""One rank of `distopt bench all-reduce`: fill, time, check."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .pattern import Pattern
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from .session import Session
    from .transports import Transport

__all__ = ["serve"]


def serve(session: Session, rank: int, world_size: int) -> None:
    """Answer the setup request, then each request for a measurement."""
    requests = session.requests()
    setup = next(requests)
    transport = TRANSPORTS[setup["library"]](rank, world_size, setup)
    session.send({"rank": transport.rank, "about": transport.about, "buffers": transport.buffers})
    for request in requests:
        session.send(measure(transport, world_size, request))


def measure(transport: Transport, world_size: int, request: dict[str, Any]) -> dict[str, Any]:
    """Collective. Time `samples` batches of `calls` all-reduces, after `warm_up` untimed ones; check every result.

    Returns:
        "seconds" per call, one entry for each timed batch, and the number of "wrong" elements over all batches.
    """
    calls: int = request["calls"]
    call = transport.call(request["buffers"], request["count"], request["capacity"], request["dtype"])
    pattern = Pattern(request["dtype"], transport.rank, world_size)
    in_place = call.input is call.result
    seconds, wrong = [], 0
    for _ in range(request["warm_up"] + request["samples"]):
        pattern.fill(call.input)
        if not in_place:
            call.result.fill(0)
        transport.sync()
        start = time.perf_counter()
        for _ in range(calls):
            call.run()
        seconds.append((time.perf_counter() - start) / calls)
        transport.sync()
        wrong += pattern.wrong(call.result, calls if in_place else 1)
        transport.sync()  # a peer may still be reading this buffer
    return {"seconds": seconds[request["warm_up"] :], "wrong": wrong}
