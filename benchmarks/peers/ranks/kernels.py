"""The process of `python -m benchmarks kernels`: times one kernel at a time on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

# task -> library and variant -> function to time
Kernels: TypeAlias = "dict[str, dict[str, Callable[[], object]]]"


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:  # noqa: ARG001 - one process, one rank
    """A description of the kernels, and a function that times one."""
    about, kernels = import_module(f".kernels_{setup['library']}", __package__).prepare(setup)

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        call = kernels[request["task"]][request["who"]]
        call()  # untimed: caches and allocator are in the state that the last kernel left
        seconds = []
        for _ in range(request["samples"]):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    names = [(task, who) for task, entries in kernels.items() for who in entries]
    return {"rank": 0, "about": about, "kernels": names}, measure
