"""Rows of measurements in the columns of nccl-tests, and the description of the machine above them."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["HEADER", "Row", "heading", "machine"]

_QUIET_LOAD = 0.5  # per core

HEADER = (
    f"#{'size':>12}{'count':>13}{'type':>10}{'redop':>7}  {'who':<13}{'buffers':<10}"
    f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'x':>8}\n"
    f"#{'(B)':>12}{'(elements)':>13}{'':>10}{'':>7}  {'':<13}{'':<10}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"
)


@dataclass(frozen=True)
class Row:
    """The measurement of one candidate with one kind of memory and one size.

    Attributes:
        who: the candidate.
        buffers: kind of memory.
        size_bytes: size of the whole array, as nccl-tests count it: what every rank has in the end, in a
            reduce_scatter what every rank had at first.
        count: its number of elements.
        dtype: its type.
        world_size: number of ranks.
        seconds: seconds per call of the slowest rank, one entry per timed batch.
        calls: consecutive calls in a batch.
        wrong: wrong elements over all batches and ranks.
        collective: what was measured.
    """

    who: str
    buffers: str
    size_bytes: int
    count: int
    dtype: str
    world_size: int
    seconds: list[float]
    calls: int
    wrong: int
    collective: str = "all_reduce"

    @property
    def reduction(self) -> str:
        """What is done to the elements of the ranks."""
        return "sum" if "reduce" in self.collective else "none"

    @property
    def time(self) -> float:
        """Median seconds."""
        return median(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.time

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank must send or receive, whatever the algorithm.

        The factors are those of nccl-tests (doc/PERFORMANCE.md there).
        """
        if self.collective == "broadcast":
            return self.algorithm_bandwidth
        rounds = 2 if self.collective == "all_reduce" else 1
        return self.algorithm_bandwidth * rounds * (self.world_size - 1) / self.world_size

    def line(self, reference: Row) -> str:
        """The row as text, with its time relative to `reference`."""
        return (
            f" {self.size_bytes:>12}{self.count:>13}{self.dtype:>10}{self.reduction:>7}  "
            f"{self.who:<13}{self.buffers:<10}{self.time * 1e6:>11.1f}"
            f"{self.algorithm_bandwidth / 1e9:>9.2f}{self.bus_bandwidth / 1e9:>9.2f}"
            f"{self.wrong:>8}{self.time / reference.time:>8.2f}"
        )

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {
            **asdict(self),
            "redop": self.reduction,
            "median_seconds": self.time,
            "algorithm_bandwidth": self.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth,
        }


def machine() -> dict[str, Any]:
    """Properties of this machine that affect measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": socket.gethostname(),
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def heading(facts: dict[str, Any]) -> str:
    """A description of the machine, with a warning if it is busy: load slows sleeping ranks more than spinning ones."""
    text = f"{facts['cores']} cores of {facts['processor']} ({facts['host']})"
    if facts["load"] > _QUIET_LOAD * facts["cores"]:
        text += f"\n# others are at work here (load average {facts['load']:.1f}): these numbers say little"
    return text
