"""What remains of many jobs, and of many collectives with errors among them: memory, descriptors, threads, files.

python -m instruments.faults.soak

starts 1,000 jobs of two ranks from one process, of which 1 % fail, and calls 10,000 collectives over shared memory and
over MPI, of which 1 % end in an error. Prints what there is after each tenth of them. It must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distopt import comm, launch
from distopt.errors import MismatchError, UsageError
from tests.processes import mpiexec_command

from .ways import can_mount, own_memory

COUNT = 1000  # elements
ERROR_EVERY = 100  # jobs or collectives
SAMPLES = 10
GROWTH_KIB = 2048  # that resident memory may differ by
# That a failed communicator over MPI keeps: one with unfinished transfers cannot be freed.
KEPT_KIB = {"mpi": 128}


class Sample(NamedTuple):
    """Resources of this process, and files in shared memory."""

    resident_kib: int
    descriptors: int
    threads: int
    files: int

    @classmethod
    def take(cls) -> Sample:
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        status = {name: value for name, _, value in (line.partition(":") for line in lines)}
        descriptors = [*Path("/proc/self/fd").iterdir()]
        files = [*Path("/dev/shm").iterdir()] if can_mount() else []  # others' otherwise
        return cls(int(status["VmRSS"].split()[0]), len(descriptors), int(status["Threads"]), len(files))


def soak(what: str, repeat: Callable[[int], int], count: int) -> None:
    """Call `repeat` with 0 ... count - 1, print what there is from time to time, and check that it does not grow.

    Args:
        what: is repeated.
        repeat: returns how much resident memory, in KiB, it may keep.
        count: how often.

    Raises:
        AssertionError: it grows.
    """
    samples, kept = [], 0
    for number in range(count):
        kept += repeat(number)
        if (number + 1) * SAMPLES % count < SAMPLES:
            samples.append(Sample.take())
            print(f"{number + 1:,} {what}: {' '.join(map(str, samples[-1]))}", flush=True)
    problem = growth(samples, kept)
    assert not problem, f"{what}: {problem}"


def growth(samples: Sequence[Sample], kept_kib: int = 0) -> str:
    """The values that grow from the second fifth of the samples to the last; empty if none."""
    early, last = samples[len(samples) // 5], samples[-1]
    grown = [
        f"{name} from {before} to {now}"
        for name, before, now in zip(Sample._fields, early, last, strict=True)
        if now > before + (GROWTH_KIB + kept_kib if name == "resident_kib" else 0)
    ]
    return ", ".join(grown)


# -- jobs --------------------------------------------------------------------------------------------------------------
def job(rank: int, world_size: int, ticket: launch.Ticket, fails: bool) -> None:
    with comm.create(launch.join(ticket, rank, world_size), "shm") as communicator:
        array = np.arange(COUNT) + rank
        communicator.all_reduce(array).wait()
        assert (array == world_size * np.arange(COUNT) + world_size * (world_size - 1) // 2).all()
        if fails and rank == 1:
            raise ValueError("the cause")


def start_job(number: int) -> int:
    fails = number % ERROR_EVERY == ERROR_EVERY - 1
    code = 0
    with contextlib.redirect_stderr(io.StringIO()) if fails else contextlib.nullcontext():
        try:
            launch.main(job, 2, (launch.Ticket(), fails))
        except SystemExit as error:
            code = error.code
    assert code == int(fails)
    return 0


# -- collectives -------------------------------------------------------------------------------------------------------
class Rank:
    """A rank that survives errors."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._job = launch.join()
        self.number = self._job.topology.rank
        self._size = self._job.topology.world_size
        self._communicator = comm.create(self._job, transport)

    def call(self, number: int) -> int:
        """A collective; at its turn, one that is a mistake of the last rank."""
        if number % ERROR_EVERY != ERROR_EVERY - 1:
            self._reduce(number)
            return 0
        if number // ERROR_EVERY % 2:
            try:
                self._communicator.broadcast(np.zeros(3), root=self._size)
            except UsageError:
                return 0  # refused at once; the communicator remains
        else:
            try:
                odd = self.number == self._size - 1
                self._communicator.all_reduce(np.zeros(COUNT + odd)).wait()
            except MismatchError:
                self._communicator.close()
                self._communicator = comm.create(self._job, self._transport)
                return KEPT_KIB.get(self._transport, 0)
        raise AssertionError("no error came")

    def _reduce(self, number: int) -> None:
        array = np.arange(COUNT, dtype=np.float32) + self.number + number
        self._communicator.all_reduce(array, label=f"sums {number}").wait()
        assert array[-1] == self._size * (COUNT - 1 + number) + self._size * (self._size - 1) // 2

    def close(self) -> None:
        self._communicator.close()
        self._job.close()


def call_collectives(transport: str, count: int) -> None:
    rank = Rank(transport)
    soak(f"collectives over {transport}, rank {rank.number}", rank.call, count)
    rank.close()


def rank_main(_, __, count: int) -> None:
    call_collectives("shm", count)


# -- parts -------------------------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[int], None]] = {
    "jobs": lambda count: soak("jobs", start_job, count),
    "shm": lambda count: launch.main(rank_main, 2, (count,)),
    "mpi": lambda count: launch.main(call_collectives, args=("mpi", count)),
}


def command(part: str, count: int, memory: Path) -> list[str]:
    """A command line that runs a part, whose /dev/shm is `memory`."""
    words = [sys.executable, "-m", "instruments.faults.soak", "--part", part, "--count", str(count)]
    return [*own_memory(memory), *(mpiexec_command(2) if part == "mpi" else []), *words]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instruments.faults.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        PARTS[options.part](options.count)
        return
    print(f"after: {', '.join(Sample._fields)}", flush=True)
    failed = False
    for part, count in (("shm", options.collectives), ("mpi", options.collectives), ("jobs", options.jobs)):
        with tempfile.TemporaryDirectory() as memory:
            failed |= subprocess.run(command(part, count, Path(memory)), check=False).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
