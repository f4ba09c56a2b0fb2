"""`distopt bench all-reduce`: this job's communicators, against MPI's own all-reduce if MPI connects the ranks."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import DistoptError, UsageError, pip_install
from .values import at_least, byte_size, names_of

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..comm.base import Array
    from ..launch import Job

_BACKENDS = ("auto", "shm", "mpi", "hierarchical", "nccl")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_BATCH_SECONDS = 1e-3  # duration of the calls that are timed together
_QUIET_LOAD = 0.5  # per core

HEADER = (
    f"#{'size':>12}{'count':>13}{'type':>10}{'redop':>7}  {'who':<13}{'buffers':<10}"
    f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'x':>8}\n"
    f"#{'(B)':>12}{'(elements)':>13}{'':>10}{'':>7}  {'':<13}{'':<10}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("bench", help="measure communication", description="Measure communication.")
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    parser = benchmarks.add_parser(
        "all-reduce",
        help="time all-reduce over a range of sizes",
        description="Measure all-reduce (sum) on the ranks of this job: N new ones on this host, or those that a "
        "launcher has started, as in `mpiexec -n 4 distopt bench all-reduce`. Where MPI connects them, its own "
        "all-reduce (mpi4py) takes turns with distopt's. Every result is checked.",
    )
    parser.add_argument("--np", type=at_least(1), metavar="N", help="ranks on this host, without a launcher (2)")
    add_sizes(parser)
    parser.add_argument("-w", type=at_least(0), default=2, metavar="N", help="untimed batches per size (2)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", metavar="TYPE", help=", ".join(_DTYPES))
    parser.add_argument(
        "--backend",
        type=names_of(_BACKENDS),
        default=["auto"],
        metavar="NAMES",
        help=f"of {','.join(_BACKENDS)}",
    )
    parser.set_defaults(run=run)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of sizes, of samples and of their file."""
    parser.add_argument("-b", type=byte_size, default=byte_size("1K"), metavar="SIZE", help="first size (1K)")
    parser.add_argument("-e", type=byte_size, default=byte_size("128M"), metavar="SIZE", help="last size (128M)")
    parser.add_argument("-f", type=at_least(2), default=4, metavar="FACTOR", help="ratio of successive sizes (4)")
    parser.add_argument("-n", type=at_least(1), default=20, metavar="N", help="timed batches per size (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")


def run(args: argparse.Namespace) -> int:
    """Collective under a launcher; else start the ranks. Return 0; rank 0 prints.

    Raises:
        UsageError: no size is given, or `--np` contradicts the launcher.
        DistoptError: a rank failed, or a result was wrong.
    """
    from .. import launch

    args.sizes = size_range(args.b, args.e, args.f, _item_bytes(args.dtype))
    if not args.sizes:
        raise UsageError(f"there is no size from -b {args.b} to -e {args.e} bytes that holds whole {args.dtype}")
    del args.run  # ranks get the rest
    info = launch.launcher()
    if info is None:
        launch.spawn(_run_rank, args.np or 2, (args,))
    elif args.np is not None:
        raise UsageError(f"--np {args.np} starts ranks, but {info.name} has started {info.size}; leave out one of them")
    else:
        launch.main(_measure_all, args=(args,))
    return 0


def size_range(first: int, last: int, factor: float, item_bytes: int) -> list[int]:
    """Sizes from `first` to `last` (bytes), each `factor` times the previous one, rounded down to whole items."""
    sizes: list[int] = []
    size = float(first)
    while size <= last:
        whole = int(size) // item_bytes * item_bytes
        if whole > (sizes[-1] if sizes else 0):
            sizes.append(whole)
        size *= factor
    return sizes


def calls_in_batch(seconds: float) -> int:
    """Number of calls of that length to time together, which makes the cost of reading the clock negligible."""
    return min(1000, math.ceil(_BATCH_SECONDS / seconds))


def _item_bytes(dtype: str) -> int:
    return 2 if "16" in dtype else 4 if "32" in dtype else 8


# -- the ranks --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Candidate:
    """A way to sum an array over all ranks.

    Attributes:
        who: whose it is.
        buffers: kind of memory.
        array: an array of the largest size; smaller ones are its start.
        all_reduce: sums an array in place, and returns when it has the result.
    """

    who: str
    buffers: str
    array: Array
    all_reduce: Callable[[Array], object]


def _run_rank(_rank: int, _world_size: int, args: argparse.Namespace) -> None:
    _measure_all(args)


def _measure_all(args: argparse.Namespace) -> None:
    """Collective. Measure every size; rank 0 prints a row for each candidate.

    Raises:
        DistoptError: a result was wrong.
    """
    from .. import comm, launch

    job = launch.join()
    communicators = [comm.create(job, name) for name in args.backend]
    lead, topology = communicators[0], job.topology
    candidates = list(_candidates(job, communicators, args))
    rows: list[Row] = []
    facts = machine()
    if topology.rank == 0:
        hosts = len(set(topology.hosts))
        print(f"# {topology.world_size} ranks on {hosts} {'hosts' if hosts > 1 else 'host'}, {heading(facts)}")
        print("# buffers: wire = the communicator's own memory; ordinary = any array; in place = MPI's, in any array")
        print(f"# time: median of {args.n} batches, each the slowest rank's; x: relative to the first line of the size")
        if reason := _no_mpi(job, args.dtype):
            print(f"# not measured: mpi4py: {reason}")
        print(HEADER, flush=True)
    for size in args.sizes:
        measured = _measure(lead, candidates, size, args)
        if topology.rank == 0:
            print("\n".join(row.line(measured[0]) for row in measured), flush=True)
        rows += measured
    wrong = sum(row.wrong for row in rows)
    if topology.rank == 0 and args.json:
        report = {"benchmark": "all-reduce", "collective": "all_reduce", "machine": facts, "dtype": args.dtype}
        report |= {"world_size": topology.world_size, "rows": [row.as_json() for row in rows]}
        args.json.write_text(json.dumps(report, indent=1))
    lead.barrier()
    for communicator in reversed(communicators):
        communicator.close()
    if wrong:
        raise DistoptError(f"{wrong} elements of the results are wrong: see column #wrong")


def _no_mpi(job: Job, dtype: str) -> str:
    """Why MPI's own all-reduce cannot be measured; empty if it can."""
    from ..launch import MpiJob

    if not isinstance(job, MpiJob):
        if find_spec("mpi4py") is None:
            return f"it is not installed: {pip_install('mpi')}"
        return f"MPI does not connect these ranks: mpiexec -n {job.topology.world_size} distopt bench all-reduce"
    return f"MPI has no {dtype}" if "16" in dtype else ""


def _candidates(job: Job, communicators: list[Communicator], args: argparse.Namespace) -> Iterator[_Candidate]:
    from ..comm.base import storage_of

    dtype, count = args.dtype, args.sizes[-1] // _item_bytes(args.dtype)
    for communicator in communicators:

        def all_reduce(array: Array, own: Communicator = communicator) -> None:
            own.all_reduce(array, wire=dtype).wait()

        yield _Candidate(communicator.name, "wire", communicator.empty(count, dtype), all_reduce)
        ordinary = communicator.xp.empty(count, storage_of(dtype))
        yield _Candidate(communicator.name, "ordinary", ordinary, all_reduce)
    if not _no_mpi(job, dtype):
        import numpy as np
        from mpi4py import MPI

        in_place = MPI.IN_PLACE
        yield _Candidate("mpi4py", "in place", np.empty(count, dtype), lambda a: MPI.COMM_WORLD.Allreduce(in_place, a))


def _measure(lead: Communicator, candidates: list[_Candidate], size: int, args: argparse.Namespace) -> list[Row]:
    """Collective. Time all candidates in turns, a batch each; `lead` exchanges the ranks' results."""
    import numpy as np

    count = size // _item_bytes(args.dtype)
    arrays = [candidate.array[:count] for candidate in candidates]
    wrong = np.zeros(len(candidates), np.int64)
    trial = np.zeros(len(candidates))
    seconds = np.zeros((args.w + args.n, len(candidates)))
    for i, (candidate, array) in enumerate(zip(candidates, arrays, strict=True)):
        wrong[i] = _count_wrong(lead, candidate, array, args.dtype)
        array[...] = 0  # stays so, however often it is summed
        trial[i] = min(_seconds_per_call(lead, candidate, array, 1) for _ in range(3))
    lead.all_reduce(wrong).wait()
    lead.all_reduce(trial, "max").wait()
    calls = [calls_in_batch(each) for each in trial]
    for batch in seconds:
        for i, (candidate, array) in enumerate(zip(candidates, arrays, strict=True)):
            batch[i] = _seconds_per_call(lead, candidate, array, calls[i])
    flat = seconds.reshape(-1)
    lead.all_reduce(flat, "max").wait()
    timed = flat.reshape(seconds.shape)[args.w :]
    world_size = lead.topology.world_size
    return [
        Row(c.who, c.buffers, size, count, args.dtype, world_size, timed[:, i].tolist(), calls[i], int(wrong[i]))
        for i, c in enumerate(candidates)
    ]


def _seconds_per_call(lead: Communicator, candidate: _Candidate, array: Array, calls: int) -> float:
    """Collective. The time on this rank."""
    lead.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        candidate.all_reduce(array)
    if lead.name == "nccl":
        lead.xp.cuda.get_current_stream().synchronize()
    return (time.perf_counter() - start) / calls


def _count_wrong(lead: Communicator, candidate: _Candidate, array: Array, dtype: str) -> int:
    """Collective. Count the wrong elements of a sum of small integers, which differ by rank and index."""
    import numpy as np

    def integers(rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return 1 + (np.arange(array.size) * (2 * rank + 3) + 7 * rank) % 31

    rank, world_size = lead.topology.rank, lead.topology.world_size
    own = integers(rank).astype(np.float32 if dtype == "bfloat16" else dtype)
    array[...] = lead.xp.asarray((own.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else own)
    lead.barrier()
    candidate.all_reduce(array)
    found = np.array(array.get() if lead.name == "nccl" else array)
    lead.barrier()  # peers may still read this array
    if dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    expected = sum((integers(each) for each in range(1, world_size)), integers(0))
    tolerance = world_size * {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype, 0.0)  # every addition may round
    return int(np.count_nonzero(~(np.abs(found - expected) <= tolerance * expected)))


# -- the table --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """The measurement of one candidate with one kind of memory and one size.

    Attributes:
        who: the candidate.
        buffers: kind of memory.
        size_bytes: size of the array, as nccl-tests count it.
        count: its number of elements.
        dtype: its type.
        world_size: number of ranks.
        seconds: seconds per call of the slowest rank, one entry per timed batch.
        calls: consecutive calls in a batch.
        wrong: wrong elements over all batches and ranks.
        reduction: what is done to the elements of the ranks.
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
    reduction: ClassVar[str] = "sum"

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
        """Bytes per second that each rank must send, whatever the algorithm (doc/PERFORMANCE.md of nccl-tests)."""
        return self.algorithm_bandwidth * 2 * (self.world_size - 1) / self.world_size

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
