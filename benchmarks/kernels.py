"""Selection and casts of a float32 array on one thread, beside NumPy, PyTorch and a plain read, in one run.

The kernels take turns; PyTorch runs in a virtual environment of its own, made on first use.

    python -m benchmarks kernels --peers torch
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from distopt import _core
from distopt.cli.values import at_least, positive
from distopt.errors import UsageError

from .networks.site import Site
from .options import names_of
from .output import heading, machine, write_json
from .peers.crew import Crew
from .peers.lineup import Candidate, Lineup, Setup, distopt_crew, torch_crew

_PEERS = ("torch",)
_OWN = "distopt"
_HEADER = f"#{'task':<32}{'who':<22}{'time':>10}{'reads':>8}{'x':>8}\n#{'':<32}{'':<22}{'(ms)':>10}{'':>8}{'':>8}"

# (task, who) -> seconds of every sample
Samples: TypeAlias = dict[tuple[str, str], list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--count", type=at_least(1), default=25_600_000, metavar="N", help="elements (25.6 million)")
    parser.add_argument("--ratio", type=positive, default=0.01, metavar="R", help="share that top-K selects (0.01)")
    parser.add_argument("-n", type=at_least(1), default=9, metavar="N", help="turns, each with one timed call (9)")
    parser.add_argument("--isa", choices=_core.supported_isas(), default=_core.isa(), help=f"({_core.isa()})")
    parser.add_argument("--peers", type=names_of(_PEERS), default=[], metavar="NAMES", help=f"of {','.join(_PEERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if every candidate was measured."""
    if args.ratio > 1:
        raise UsageError(f"--ratio {args.ratio:g} is more than all elements")
    options = {"count": args.count, "k": max(1, int(args.ratio * args.count)), "isa": args.isa}
    facts = machine()
    with Lineup() as lineup:
        for name in ("distopt", *args.peers):
            lineup.add(name, partial(_crew, name, options))
        print(f"# {args.count:,} float32, K = {options['k']:,}, one thread per process, {heading(facts)}")
        lineup.describe()
        print(f"# time: median of {args.n}; reads: relative to a plain read; x: relative to distopt for the same task")
        print(_HEADER, flush=True)
        samples = _measure(lineup, args.n)
        for line in lines(samples):
            print(line)
        lineup.report_missing()
    if args.json:
        rows = [
            {"task": task, "who": who, "median_seconds": median(seconds), "seconds": seconds}
            for (task, who), seconds in samples.items()
        ]
        report = {"benchmark": "kernels", "machine": facts, **options, "missing": lineup.missing, "rows": rows}
        write_json(args.json, report)
    return 1 if lineup.missing else 0


def lines(samples: Samples) -> list[str]:
    """The rows of the table, grouped by task."""
    times = {key: median(seconds) for key, seconds in samples.items()}
    read = times.get(("read", _OWN))
    text = []
    for task in dict.fromkeys(task for task, _ in times):
        own = times.get((task, _OWN))
        for (other, who), seconds in times.items():
            if other == task:
                reads, ratio = (f"{seconds / base:.2f}" if base else "-" for base in (read, own))
                text.append(f" {task:<32}{who:<22}{seconds * 1e3:>10.3f}{reads:>8}{ratio:>8}")
    return text


def _crew(name: str, options: dict[str, Any]) -> tuple[Crew, Setup]:
    own = name == _OWN
    crew, setup = distopt_crew("kernels", Site(1), "single") if own else torch_crew("kernels", Site(1))
    return crew, {**setup, **options}


def _measure(lineup: Lineup, turns: int) -> Samples:
    samples: Samples = {}

    def measure(candidate: Candidate, _: int) -> None:
        for task, who in candidate.hello["kernels"]:
            answer = candidate.crew.ask({"task": task, "who": who, "samples": 1})[0]
            samples.setdefault((task, who), []).extend(answer["seconds"])

    lineup.take_turns(turns, measure)
    return samples
