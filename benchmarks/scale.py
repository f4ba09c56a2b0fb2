"""Weak scaling of ResNets: images/s by number of ranks, for DistributedDataParallel over distopt and for `nn`.

Every rank has a batch of the same size. Beside DDP over distopt, and in turns with it, run DDP over Gloo; DDP whose
all-reduce does nothing, which is the most that any group can reach; `nn`, also with codecs; as many one-rank DDP jobs at
the same time ("apart"), which shows what ranks cost each other without sending anything; and two jobs at once. On this
machine every rank has its own share of the cores.

    python -m benchmarks scale --model resnet50 --image-size 128 --batch-size 8 --ranks 1,2
    sudo .venv/bin/python -m benchmarks scale --image-size 128 --batch-size 8 --emulate 1,2 --rates 1gbit,10gbit
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from distopt.cli.values import at_least
from distopt.errors import UsageError

from .networks.emulation import LINK, RATES, two_hosts
from .networks.site import EmulatedSite, ListedSite, Site
from .options import names_of
from .output import heading, machine, put, table, write_json
from .peers.crew import Crew
from .peers.lineup import Candidate, Lineup, Setup, distopt_crew, torch_crew

MODELS = ("resnet18", "resnet50")
DDP, GLOO, CEILING, NN = "DDP over distopt", "DDP over Gloo", "DDP over an empty all-reduce", "nn"
# Added to the setup of `ranks.train_torch`, whose process group is that of distopt.
CHANGED = {GLOO: {"group": "gloo"}, CEILING: {"hook": "nothing"}}
APART, TWO_JOBS = "apart", "two jobs at once"
ONLY = {"distopt": DDP, "gloo": GLOO, "nothing": CEILING, "nn": NN, "apart": APART, "two-jobs": TWO_JOBS}
CODECS: dict[str, dict[str, Any]] = {
    "fp16": {"name": "fp16"},
    "top-k": {"name": "top-k", "ratio": 0.01, "error_feedback": True},
    "power-sgd": {"name": "power-sgd", "rank": 2, "error_feedback": True},
}
# Horovod on 1, 2 and 4 nodes, 1,024 images a node.
REFERENCE = {1: 2757.21, 2: 5391.75, 4: 10675.09}


@dataclass
class Row:
    """A candidate with a number of ranks.

    Attributes:
        who: its name.
        ranks: of all its jobs.
        jobs: that share the ranks.
        site: where they run.
        rates: images/s of every job, for each repeat.
        sent_bytes: through the network in a step, by all ranks of the first host; None within one host.
        equal: whether the ranks of each job ended with the same parameters.
    """

    who: str
    ranks: int
    site: Site
    jobs: int = 1
    rates: list[list[float]] = field(default_factory=list)
    sent_bytes: float | None = None
    equal: bool = True

    @property
    def name(self) -> str:
        """The software, and the number of ranks."""
        return f"{self.who} x{self.ranks}"

    @property
    def sums(self) -> list[float]:
        """Images/s of all jobs, for each repeat."""
        return [sum(rates) for rates in self.rates]

    def start(self, args: argparse.Namespace) -> tuple[Crew, Setup]:
        """Its ranks."""
        if self.who.startswith(NN):
            far = isinstance(self.site, (EmulatedSite, ListedSite))
            transport = "single" if self.ranks == 1 else "hierarchical" if far else "shm"
            crew, setup = distopt_crew("train", self.site, transport)
            if codec := CODECS.get(self.who.removeprefix(f"{NN}, ")):
                setup["codec"] = codec
        else:
            crew, setup = torch_crew("train", self.site, group="distopt")
            setup |= CHANGED.get(self.who, {})
        setup |= {"model": args.model, "image_size": args.image_size, "batch_size": args.batch_size}
        return crew, {**setup, "jobs": self.jobs, "own_cores": type(self.site) is Site}

    def measure(self, candidate: Candidate, args: argparse.Namespace) -> None:
        """One repeat."""
        interface = LINK if isinstance(self.site, EmulatedSite) else "lo"
        answers = candidate.crew.ask({"steps": args.steps, "warm_up": args.warm_up, "interface": interface})
        members = self.ranks // self.jobs
        self.rates.append([])
        for first in range(0, self.ranks, members):
            job = answers[first : first + members]
            seconds = sum(max(step) for step in zip(*(answer["seconds"] for answer in job), strict=True))
            self.rates[-1].append(members * args.batch_size * args.steps / seconds)
            self.equal &= self.who == CEILING or len({answer["parameters"] for answer in job}) == 1
        if interface == LINK:
            self.sent_bytes = answers[0]["interface_bytes"] / args.steps


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="(resnet50)")
    parser.add_argument("--image-size", type=at_least(32), default=128, metavar="S", help="rows and columns (128)")
    parser.add_argument("--batch-size", type=at_least(2), default=8, metavar="B", help="images per rank (8)")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--ranks", type=_numbers, metavar="LIST", help="numbers of ranks on this machine (1,2)")
    places.add_argument("--hosts", type=Path, metavar="FILE", help="all ranks of a hosts file, and one here")
    places.add_argument(
        "--emulate", type=_numbers, metavar="LIST", help="numbers of ranks, half on each of two emulated hosts; as root"
    )
    parser.add_argument(
        "--rates", type=names_of(RATES), default=[], metavar="LIST", help=f"of the emulated link: {', '.join(RATES)}"
    )
    parser.add_argument("--codecs", type=names_of(CODECS), default=[], metavar="NAMES", help=f"{', '.join(CODECS)}")
    parser.add_argument(
        "--only", type=names_of(ONLY), default=list(ONLY), metavar="NAMES", help=f"candidates ({','.join(ONLY)})"
    )
    parser.add_argument("--steps", type=at_least(1), default=4, metavar="N", help="timed steps of a repeat (4)")
    parser.add_argument(
        "--warm-up",
        type=at_least(0),
        default=4,
        metavar="N",
        help="untimed ones before, in which DDP lays out its buckets (4)",
    )
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="(3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speed-up to FILE; needs matplotlib")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="put the tables between the marks of PAGE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if every candidate was measured and its ranks agreed."""
    if args.rates and not args.emulate:
        raise UsageError("--rates are those of the link between emulated hosts; add --emulate 1,2")
    facts, found, missing = machine(), {}, {}
    head = f"{args.model}, {args.image_size} x {args.image_size} pixels, batch {args.batch_size} per rank"
    print(f"# {head}, {args.repeats} repeats of {args.steps} steps, on {heading(facts)}")
    on = heading(facts).replace("\n# ", "; ")
    parts = [f"{head}; medians of {args.repeats} repeats of {args.steps} steps; {on}."]
    for rate in args.rates or [""]:
        with ExitStack() as stack:
            only = {ONLY[name] for name in args.only}
            rows = [row for row in rows_of(args, rate, stack) if row.who.partition(",")[0] in only]
            missing |= measure_all(rows, args)
        place = f"Two emulated hosts, {rate or 'no limit of rate'}" if args.emulate else "This machine"
        found[place if not args.hosts else str(args.hosts)] = rows = [row for row in rows if row.rates]
        parts += [f"### {place}" if args.emulate else "", text_of(rows)]
        print(f"\n{parts[-2]}\n{parts[-1]}", flush=True)
    for name, reason in missing.items():
        print(f"# not measured: {name}: {reason}")
    wrong = [row.name for rows in found.values() for row in rows if not row.equal]
    for name in wrong:
        print(f"# {name}: parameters differ between ranks")
    if args.json:
        rows = [
            {"place": place, "who": row.who, "ranks": row.ranks, "jobs": row.jobs, "images_per_second": row.rates}
            | {"sent_bytes": row.sent_bytes}
            for place, rows in found.items()
            for row in rows
        ]
        report = {"benchmark": "scale", "model": args.model, "image_size": args.image_size, "machine": facts}
        write_json(args.json, report | {"batch_size": args.batch_size, "missing": missing, "rows": rows})
    if args.plot:
        plot(found, args.plot)
        parts.append(f"![Speed-up by number of ranks]({args.plot.name})")
    if args.output:
        put(args.output, f"scale{' --emulate' if args.emulate else ''}", "\n\n".join(filter(None, parts)))
    return 1 if missing or wrong else 0


def rows_of(args: argparse.Namespace, rate: str, stack: ExitStack) -> list[Row]:
    """All rows of one place: every candidate, and one rank of each library."""
    rows = [Row(DDP, 1, Site(1)), Row(NN, 1, Site(1))]
    names = [DDP, GLOO, CEILING, NN, *(f"{NN}, {codec}" for codec in args.codecs)]
    if args.hosts:
        site = ListedSite(args.hosts)
        return [*rows, *(Row(who, site.world_size, site) for who in names)]
    numbers = args.emulate or args.ranks or [1, 2]
    if args.emulate:
        if any(n % 2 for n in numbers if n > 1):
            raise UsageError("--emulate takes 1 and even numbers: half of the ranks run on each of two hosts")
        net = stack.enter_context(two_hosts("-scale"))
        for host in net.hosts if rate else ():
            host.shape(rate)
        return [*rows, *(Row(who, n, EmulatedSite(net, n // 2)) for n in numbers if n > 1 for who in names)]
    for n in numbers:
        if n > 1:
            rows += [*(Row(who, n, Site(n)) for who in names), Row(APART, n, Site(n), jobs=n)]
    most = max(numbers)
    return rows if most < 2 or most % 2 else [*rows, Row(TWO_JOBS, most, Site(most), jobs=2)]


def measure_all(rows: list[Row], args: argparse.Namespace) -> dict[str, str]:
    """Repeat all rows in turns; what could not be measured, and why."""
    by_name = {row.name: row for row in rows}
    with Lineup() as lineup:
        for row in rows:
            print(f"# starting {row.name}", file=sys.stderr, flush=True)
            lineup.add(row.name, partial(row.start, args))

        def measure(candidate: Candidate, turn: int) -> None:
            print(f"# repeat {turn + 1} of {args.repeats}, {candidate.name}", file=sys.stderr, flush=True)
            by_name[candidate.name].measure(candidate, args)

        lineup.take_turns(args.repeats, measure)
        return lineup.missing


def ratio(row: Row, other: Row | None) -> float | None:
    """Median over repeats of the quotient of two rows, each within a repeat, as the machine's speed changes."""
    return median(a / b for a, b in zip(row.sums, other.sums, strict=False)) if other else None


def speed_up(row: Row, rows: list[Row]) -> float | None:
    """Times as many images/s as one rank of the same library, without a codec."""
    base = NN if row.who.startswith(NN) else DDP
    return ratio(row, next((one for one in rows if (one.who, one.ranks) == (base, 1)), None))


def text_of(rows: list[Row]) -> str:
    """A table in Markdown."""
    head = ["ranks", "candidate", "images/s", "spread", "speed-up", "of linear", "of the empty all-reduce", "sent"]
    lines = []
    for row in rows:
        ups = speed_up(row, rows)
        linear = f"{ups / row.ranks:.1%}" if ups is not None else ""
        ceiling = ratio(row, next((one for one in rows if (one.who, one.ranks) == (CEILING, row.ranks)), None))
        who = row.who
        if who == TWO_JOBS:
            own = " + ".join(f"{median(job):.2f}" for job in zip(*row.rates, strict=True))
            who = f"{who}, ranks and cores halved: {own}"
        spread = f"{min(row.sums):.2f} ... {max(row.sums):.2f}"
        sent = "" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:.1f} MB"
        cells = [f"{median(row.sums):.2f}", spread, "" if ups is None else f"{ups:.2f}", linear]
        lines.append([row.ranks, who, *cells, "" if ceiling is None else f"{ceiling:.1%}", sent])
    return table(head, lines)


def plot(found: dict[str, list[Row]], path: Path) -> None:
    """Draw the speed-up by the number of ranks, a panel for each place, with Horovod's on other hardware."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5 * len(found), 4.5), layout="constrained")  # drawn without a display
    for axes, (place, rows) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        most = max(4, *(row.ranks for row in rows))
        axes.plot([1, most], [1, most], "k--", label="linear")
        axes.plot([*REFERENCE], [rate / REFERENCE[1] for rate in REFERENCE.values()], "x", label="Horovod, other nodes")
        for who in dict.fromkeys(row.who for row in rows):
            base = [(1, 1.0)] if who not in (APART, TWO_JOBS) else []
            points = [(row.ranks, speed_up(row, rows)) for row in rows if row.who == who and row.ranks > 1]
            axes.plot(*zip(*base, *points, strict=True), marker="o", markersize=4, label=who)
        axes.set(title=place, xlabel="ranks", ylabel="speed-up", xticks=range(1, most + 1))
        axes.legend(fontsize=7)
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)


def _numbers(text: str) -> list[int]:
    """Numbers of ranks, in order."""
    return sorted({at_least(1)(word) for word in text.split(",")})
