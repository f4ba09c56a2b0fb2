"""Where the time of a collective between hosts goes in process groups of distopt, by the functions that it passes through."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any

_HOSTS = "distopt.torch.hosts"
# Module, attribute, phase.
_FUNCTIONS = (
    (f"{_HOSTS}.communicator", "HostsCommunicator.carry_out", "steps"),
    (f"{_HOSTS}.exchange", "Between.announce", "describe"),
    (f"{_HOSTS}.gloo", "Gloo.send", "send"),
    (f"{_HOSTS}.gloo", "Gloo.receive", "receive"),
    (f"{_HOSTS}.gloo", "Gloo.wait", "poll"),
    (f"{_HOSTS}.exchange", "fold", "reduce"),
    (f"{_HOSTS}.communicator", "fold", "reduce"),
    ("distopt.comm.native", "NativeCommunicator._start", "host"),
    ("distopt.comm.native", "NativeCommunicator.all_reduce", "host"),
    ("distopt._core", "ShmWork.wait", "host"),
)


class Recorder:
    """Seconds in each phase, without those of the phases that it contains. It replaces the functions of this process."""

    def __init__(self) -> None:
        self._phase, self._last = "outside", time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        for module, path, phase in _FUNCTIONS:
            *owners, name = path.split(".")
            owner: Any = import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            setattr(owner, name, self._recorded(getattr(owner, name), phase))

    def take(self) -> dict[str, float]:
        """Seconds in each phase since the last call."""
        self._enter(self._phase)
        taken, self._seconds = self._seconds, defaultdict(float)
        return dict(taken)

    def _enter(self, phase: str) -> str:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._last
        self._last, before, self._phase = now, self._phase, phase
        return before

    def _recorded(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            before = self._enter(phase)
            try:
                return function(*args, **options)
            finally:
                self._enter(before)

        return recorded
