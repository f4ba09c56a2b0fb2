"""One rank of `python -m benchmarks all-reduce`: fill, time, check."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from .libraries import LIBRARIES, Call, Library
from .pattern import Pattern
from .train import interface_bytes


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """A description of this rank, and a function that measures."""
    library = LIBRARIES[setup["library"]](rank, world_size, setup)
    hello = {"rank": library.rank, "about": library.about, "buffers": library.buffers}
    return hello, partial(measure, library, world_size)


def measure(library: Library, world_size: int, request: dict[str, Any]) -> dict[str, Any]:
    """Collective. Check the results, then time `samples` batches of `calls` collectives after `warm_up` untimed ones.

    Timed are sums of zeros, which stay zeros in place. The calls of a batch follow one another at once. In a broadcast
    that would let a constant root run ahead, and time its sends alone. So the ranks take turns as root, as in the Intel
    MPI Benchmarks (IMB-MPI1 Bcast): each receives from the root before it, and is root only then.

    Returns:
        "seconds" per call, one entry for each timed batch, and when it began ("begins", seconds on the clock of the
        host); the number of "wrong" elements; and, if the request names an "interface", the "interface_bytes" that it
        has sent for a call of the untimed batches: to read its counter takes as long as a small sum, and not equally
        long on all ranks. If the request has "profile", a "spans" entry for each timed batch: when it began, and seconds
        per call of processor time and of each phase.
    """
    calls, collective = request["calls"], request["collective"]
    call = library.call(collective, request["buffers"], request["count"], request["capacity"], request["dtype"])
    roots = range(world_size if collective == "broadcast" else 1)
    wrong = sum(check(library, world_size, root, call, request) for root in roots)
    call.input.fill(0)
    interface, profile = request.get("interface"), request.get("profile")
    begins, seconds, sent, spans = [], [], [], []
    for batch in range(request["warm_up"] + request["samples"]):
        roots = [(batch + i) % world_size for i in range(calls)]
        counts = interface is not None and batch < request["warm_up"]
        library.sync()
        before = interface_bytes(interface) if counts else 0
        if profile:
            library.phases()
        used, start = time.process_time(), time.perf_counter()
        for root in roots:
            call.run(root)
        begins.append(start)
        seconds.append((time.perf_counter() - start) / calls)
        if profile:
            phases = {"cpu": time.process_time() - used, **library.phases()}
            spans.append({"begin": start, **{name: spent / calls for name, spent in phases.items()}})
        if counts:
            sent.append((interface_bytes(interface) - before) / calls)
    library.sync()  # a peer may still be reading this buffer
    timed = seconds[request["warm_up"] :]
    return {
        "seconds": timed,
        "begins": begins[request["warm_up"] :],
        "wrong": wrong,
        "interface_bytes": median(sent or [0]),
        "spans": spans[request["warm_up"] :],
    }


def check(library: Library, world_size: int, root: int, call: Call, request: dict[str, Any]) -> int:
    """Collective. How many elements of a result are wrong on this rank."""
    pattern = Pattern(request["dtype"], library.rank, world_size)
    if call.result is not call.input:
        call.result.fill(0)
    pattern.fill(call.input)
    library.sync()
    call.run(root)
    library.sync()
    match request["collective"]:
        case "all_reduce":
            wrong = pattern.wrong(call.result)
        case "reduce_scatter":
            wrong = pattern.wrong(call.result, first=call.result.size * library.rank)
        case "broadcast":
            wrong = pattern.strange(call.result, root)
        case _:
            parts = call.result.reshape(world_size, -1)
            wrong = sum(pattern.strange(part, rank) for rank, part in enumerate(parts))
    library.sync()  # a peer may still be reading this buffer
    return wrong
