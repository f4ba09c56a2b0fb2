"""The process of `python -m benchmarks kernels`: times one kernel at a time on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias

from .session import Session

# task -> library and variant -> function to time
Kernels: TypeAlias = "dict[str, dict[str, Callable[[], object]]]"


def serve(session: Session, rank: int, world_size: int) -> None:  # noqa: ARG001 - one process, one rank
    """Answer the setup request, then each request for samples of one kernel."""
    requests = session.requests()
    setup = next(requests)
    library = import_module(f".kernels_{setup['library']}", __package__)
    about, kernels = library.prepare(setup)
    names = [(task, who) for task, entries in kernels.items() for who in entries]
    session.send({"rank": 0, "about": about, "kernels": names})
    for request in requests:
        call = kernels[request["task"]][request["who"]]
        call()  # untimed: caches and allocator are in the state that the last kernel left
        seconds = []
        for _ in range(request["samples"]):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        session.send({"seconds": seconds})
