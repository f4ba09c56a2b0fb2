"""Where the time goes in process groups of distopt, by the functions that a collective passes through."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

_HOSTS, _GROUP = "distopt.torch.hosts", "distopt.torch.group"
# Module, attribute, phase: of sums between hosts.
BETWEEN_HOSTS = (
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
# Of a group in one host: all that autograd, DDP, FSDP2 or a script calls.
IN_HOST = (
    (f"{_GROUP}.process_group", "DistoptProcessGroup.allreduce", "python"),
    (f"{_GROUP}.process_group", "DistoptProcessGroup._run", "python"),
    (f"{_GROUP}.queue", "PendingWork.wait", "python"),
    (f"{_GROUP}.queue", "PendingWork.get_future", "python"),
    (f"{_GROUP}.queue", "_AtTheEnd.__call__", "python"),
    (f"{_GROUP}.queue", "OperationQueue._wait", "thread"),
)


def watch(group: Any) -> Callable[[], dict[str, float]]:
    """Local. A function that gives the seconds in each phase of this thread since its last call, for a group of distopt."""
    core = getattr(group._channels.first.communicator, "core", None)
    if core is None:
        return Recorder(BETWEEN_HOSTS).take
    recorder = Recorder(IN_HOST)

    def take() -> dict[str, float]:
        phases = core.take_phases()
        del phases["outside"]
        spent = recorder.take()
        return {**spent, "python": spent.get("python", 0.0) - sum(phases.values()), **phases}

    return take


class Recorder:
    """Seconds of this thread in each phase, without those of the phases that it contains.

    Args:
        functions: module, attribute and phase of each function, which it replaces in this process.
    """

    def __init__(self, functions: Sequence[tuple[str, str, str]]) -> None:
        self._thread = threading.get_ident()
        self._phase, self._last = "outside", time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        for module, path, phase in functions:
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
            if threading.get_ident() != self._thread:
                return function(*args, **options)
            before = self._enter(phase)
            try:
                return function(*args, **options)
            finally:
                self._enter(before)

        return recorded
