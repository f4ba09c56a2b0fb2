"""One rank that trains a network, for the benchmarks of training steps: times steps and the phases within them.

Of the setup, "model" names the network (the reference CNN), "image_size" the rows and columns of its images, "batch_size"
those of one rank and step. "jobs" is the number of equal jobs that share the ranks, and do not know of each other (1). With
"own_cores", every rank keeps to its share of the cores.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASES = ("forward", "backward", "communication", "update")


class Trainer(ABC):
    """A model and its optimizer in some library.

    Attributes:
        rank: this rank.
        about: library and version.
    """

    rank: int
    about: str

    @abstractmethod
    def step(self) -> None:
        """Collective. Train on this rank's batch, the same one in every step."""

    @abstractmethod
    def phases(self, seconds: float) -> dict[str, float]:
        """Local, called once after each step. How the `seconds` of the step divide among `PHASES`.

        NaN for a phase that is included in the preceding one.
        """

    @abstractmethod
    def parameters(self) -> bytes:
        """Local. The parameters, for comparison between ranks."""

    def calls(self) -> dict[str, float]:
        """Local. Seconds in each kind of event of the timeline since the last call; empty without one."""
        return {}

    def sent_bytes(self) -> int:
        """Local. What the library says that it has sent; 0 if it does not."""
        return 0


def prepare(setup: dict[str, Any], rank: int, world_size: int) -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
    """A description of this rank, and a function that runs steps."""
    if setup.get("own_cores"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(len(cores) // world_size, 1)
        first = rank * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
    library = import_module(f".train_{setup['library']}", __package__)
    if (jobs := setup.get("jobs", 1)) == 1:
        trainer: Trainer = library.Trainer(rank, world_size, setup)
        rank = trainer.rank  # which mpiexec may have given
    else:
        job, member = divmod(rank, world_size // jobs)
        folder = Path(setup["folder"], str(job))
        folder.mkdir(exist_ok=True)
        trainer = library.Trainer(member, world_size // jobs, {**setup, "folder": str(folder)})
    return {"rank": rank, "about": trainer.about}, partial(measure, trainer)


def measure(trainer: Trainer, request: dict[str, Any]) -> dict[str, Any]:
    """Collective. Time `steps` steps individually, after `warm_up` untimed ones; count what `interface` has sent.

    "spans" has for each step when it began, on the clock of the host, seconds of processor time and of each phase.
    """
    steps, warm_up, interface = request["steps"], request["warm_up"], request.get("interface", "lo")
    sent, through = trainer.sent_bytes(), interface_bytes(interface)
    seconds: list[float] = []
    spans: list[dict[str, float]] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    for number in range(warm_up + steps):
        if number == warm_up:
            sent, through = trainer.sent_bytes(), interface_bytes(interface)
        trainer.calls()
        used, start = time.process_time(), time.perf_counter()
        trainer.step()
        elapsed = time.perf_counter() - start
        span = {"begin": start, "cpu": time.process_time() - used, **trainer.calls()}
        spent = trainer.phases(elapsed)
        if number >= warm_up:
            seconds.append(elapsed)
            spans.append(span)
            for name in PHASES:
                phases[name].append(spent[name])
    return {
        "seconds": seconds,
        "phases": phases,
        "spans": spans,
        "parameters": hashlib.sha256(trainer.parameters()).hexdigest()[:16],
        "sent_bytes": trainer.sent_bytes() - sent,
        "interface_bytes": interface_bytes(interface) - through,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "now_bytes": resident_bytes(),
    }


def interface_bytes(name: str) -> int:
    """Bytes sent through a network interface: headers and acknowledgements included."""
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def resident_bytes() -> tuple[int, int]:
    """Rss, all pages that this process has mapped and touched; and Pss, where shared ones are divided."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Rss"].split()[0]) << 10, int(fields["Pss"].split()[0]) << 10


def synthetic_batch(setup: dict[str, Any], rank: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Inputs (batch size, ...) and labels (batch size) of one rank, for the network that `setup` names."""
    name, size, rng = setup.get("model", "cnn"), setup["batch_size"], np.random.default_rng(rank)
    shapes = {"cnn": (1, 28, 28), "mlp": (2048,)}
    shape = shapes.get(name) or (3, setup["image_size"], setup["image_size"])
    inputs = rng.standard_normal((size, *shape), dtype=np.float32)
    return inputs, rng.integers(0, 10 if name in shapes else 1000, size).astype(np.int32)
