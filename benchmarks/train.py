"""Training steps of the reference CNN on a synthetic batch, one thread per rank, beside PyTorch, in one run.

They run with the given ranks and with one. The candidates take turns. PyTorch runs in a virtual environment of its own,
made on first use: torch-ddp with default settings; torch-tuned with channels_last, pooling before ReLU, fused SGD,
gradients and freed memory kept allocated, and DDP with a static graph and bucket views; torch-tuned-bf16 the same with
bfloat16 autocast. --apart adds as many one-rank jobs, run side by side without communication.

    python -m benchmarks train --np 2 --peers torch-ddp,torch-tuned,torch-tuned-bf16
"""

from __future__ import annotations

import argparse
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from distopt.cli.values import at_least

from .networks.site import Site, add_places, is_far, site_of
from .options import names_of
from .output import heading, machine, write_json
from .peers.crew import Crew
from .peers.lineup import Candidate, Lineup, Setup, distopt_crew, torch_crew
from .peers.ranks.train import PHASES

# The options of `ranks.train_torch` for each peer.
_PEERS = {
    "torch-ddp": {"tuned": False, "bfloat16": False},
    "torch-tuned": {"tuned": True, "bfloat16": False},
    "torch-tuned-bf16": {"tuned": True, "bfloat16": True},
}
# By default, glibc returns large freed blocks to the kernel, so every step faults their pages in again.
_KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
_APART = "apart"  # distopt, with each process a separate one-rank job
_HEADER = (
    f"#{'who':<17}{'ranks':>6}{'step':>9}{'images/s':>11}{'efficiency':>12}{'x':>7}   "
    f"{'forward':>8}{'backward':>9}{'exposed':>8}{'update':>8}{'memory':>9}\n"
    f"#{'':<17}{'':>6}{'(ms)':>9}{'':>11}{'':>12}{'':>7}   "
    f"{'(ms)':>8}{'(ms)':>9}{'(ms)':>8}{'(ms)':>8}{'(MiB)':>9}"
)


@dataclass
class Result:
    """Samples of one candidate.

    Attributes:
        who: the candidate, without its number of ranks.
        world_size: ranks.
        batch_size: images per rank and step.
        seconds: one entry per step, the slowest rank's.
        phases: seconds of rank 0 in each phase, one entry per step.
        resident_bytes: largest resident set of a rank.
        equal: whether all ranks had the same parameters at the end of every turn.
    """

    who: str
    world_size: int
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})
    resident_bytes: int = 0
    equal: bool = True

    def add(self, answers: list[dict[str, Any]]) -> None:
        """Add the answers of all ranks to one request."""
        self.seconds += [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]
        for name in PHASES:
            self.phases[name] += answers[0]["phases"][name]
        self.resident_bytes = max(self.resident_bytes, *(answer["resident_bytes"] for answer in answers))
        self.equal &= len({answer["parameters"] for answer in answers}) == 1

    @property
    def images_per_second(self) -> float:
        """All ranks together."""
        return self.world_size * self.batch_size / median(self.seconds)

    def phase(self, name: str) -> float:
        """Median seconds; NaN if the library does not report it."""
        return median(self.phases[name])

    def line(self, alone: Result | None, reference: Result) -> str:
        """The result as text. `alone` is the same candidate with one rank; speeds are relative to `reference`."""
        efficiency = self.images_per_second / alone.images_per_second / self.world_size if alone else math.nan
        phases = [_milliseconds(self.phase(name)) for name in PHASES]
        return (
            f" {self.who:<17}{self.world_size:>6}{median(self.seconds) * 1e3:>9.2f}{self.images_per_second:>11.0f}"
            f"{'-' if math.isnan(efficiency) else f'{efficiency:.1%}':>12}"
            f"{self.images_per_second / reference.images_per_second:>7.2f}   "
            f"{phases[0]:>8}{phases[1]:>9}{phases[2]:>8}{phases[3]:>8}{self.resident_bytes / 2**20:>9.0f}"
        )

    def as_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        phases = {name: None if math.isnan(self.phase(name)) else self.phase(name) for name in PHASES}
        rates = {"median_seconds": median(self.seconds), "images_per_second": self.images_per_second}
        return {**asdict(self), **rates, "phases": phases}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_places(parser, at_least(1))
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="images per rank (64)")
    parser.add_argument("--transport", choices=["shm", "mpi", "hierarchical"], help="(shm; between hosts mpi)")
    parser.add_argument("--peers", type=names_of(_PEERS), default=[], metavar="NAMES", help=f"of {','.join(_PEERS)}")
    parser.add_argument("--apart", action="store_true", help="also run N one-rank jobs that do not communicate")
    parser.add_argument("-n", type=at_least(1), default=100, metavar="N", help="timed steps in each turn (100)")
    parser.add_argument("-w", type=at_least(0), default=10, metavar="N", help="untimed steps in each turn (10)")
    parser.add_argument("--turns", type=at_least(1), default=4, metavar="N", help="turns of each candidate (4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if every candidate was measured and its ranks agreed on the parameters."""
    results: dict[str, Result] = {}
    facts = machine()
    args.transport = args.transport or ("mpi" if is_far(args) else "shm")
    with ExitStack() as stack:
        site = site_of(args, [args.transport], stack)
        args.np = site.world_size
        lineup = stack.enter_context(Lineup())
        for who in ("distopt", *([_APART] if args.apart else []), *args.peers):
            for world_size in [args.np] if who == _APART else sorted({args.np, 1}, reverse=True):
                name = f"{who} x{world_size}"
                here = site if world_size == args.np and who != _APART else Site(world_size)
                lineup.add(name, partial(crew_of, who, here, args))
                results[name] = Result(who, world_size, args.batch_size)
        _print_head(args, lineup, site, facts)
        lineup.take_turns(args.turns, lambda candidate, _: _take_turn(candidate, results[candidate.name], args))
        missing = lineup.missing
    done = {name: result for name, result in results.items() if result.seconds}
    for result in done.values():
        alone = done.get(f"{'distopt' if result.who == _APART else result.who} x1")
        print(result.line(alone, next(iter(done.values()))))
        if not result.equal:
            print(f"# {result.who}: the ranks' parameters differ")
    lineup.report_missing()
    if args.json:
        report = {"benchmark": "train", "model": "cnn", "machine": facts, "missing": missing}
        report["rows"] = [result.as_json() for result in done.values()]
        write_json(args.json, report)
    return 1 if missing or not all(result.equal for result in done.values()) else 0


def crew_of(who: str, site: Site, args: argparse.Namespace) -> tuple[Crew, Setup]:
    """The ranks of a candidate."""
    if who == _APART:
        crew, setup = distopt_crew("train", site, "single")
        setup["jobs"] = site.world_size
    elif who == "distopt":
        crew, setup = distopt_crew("train", site, args.transport if site.world_size > 1 else "single")
    else:
        crew, setup = torch_crew("train", site, _KEEP_MEMORY if _PEERS[who]["tuned"] else None)
        setup |= _PEERS[who]
        if site.world_size == 1:  # the bare model
            setup["group"] = ""
    return crew, {**setup, "batch_size": args.batch_size}


def _take_turn(candidate: Candidate, result: Result, args: argparse.Namespace) -> None:
    result.add(candidate.crew.ask({"steps": args.n, "warm_up": args.w}))


def _print_head(args: argparse.Namespace, lineup: Lineup, site: Site, facts: dict[str, Any]) -> None:
    print(f"# cnn, batch size {args.batch_size} per rank, {args.np} ranks{site.described} on {heading(facts)}")
    lineup.describe()
    print("# step: median over steps of the slowest rank; efficiency: images/s per rank, relative to one rank alone")
    print("# x: speed relative to the first line; exposed: communication not hidden behind backward, on rank 0")
    print(_HEADER, flush=True)


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f}"
