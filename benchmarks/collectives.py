"""Collectives between two emulated hosts, beside MPI's own and Gloo's: the tables of docs/results/network.md.

Each table is one or two runs of `all-reduce --emulate`, over the MPI library of this environment. What a run has
measured is kept in --results, so that the page can be made of several runs, in several environments. Needs
root, iproute2 and mpi4py with MPICH or Open MPI; peers get environments of their own.

    sudo .venv/bin/python -m benchmarks collectives
    sudo .venv/bin/python -m benchmarks collectives --only 2x1,1gbit,all_reduce
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

from distopt.cli.values import at_least
from distopt.errors import DistoptError, UsageError

from . import output
from .__main__ import main
from .options import byte_sizes, names_of
from .output import ROOT, put, write_json
from .peers.ranks.libraries import COLLECTIVES

# Bits per second; the unshaped link carries about 10 Gbit/s.
RATES = {"unshaped": 1e10, "1gbit": 1e9, "100mbit": 1e8}
OTHERS_AT = ("unshaped", "1gbit")  # the rates of the collectives other than all_reduce
SPOKEN = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
SIZES = [256, 4 << 10, 64 << 10, 1 << 20, 25_600_000]
LARGEST = {"100mbit": 4 << 20}
LONG_SECONDS = 0.05  # of the bytes on the wire; such sizes get a quarter of the samples, and no warm-up
TRANSPORTS = {"2x1": ["mpi"], "2x2": ["mpi", "hierarchical"]}
PEERS = {"mpich": "MPICH", "openmpi": "Open MPI", "gloo": "Gloo"}


@dataclass(frozen=True)
class Table:
    """One table: ranks on each host, rate of the link, collective."""

    ranks: str
    rate: str
    collective: str

    @property
    def a_host(self) -> str:
        """Ranks on each host."""
        return self.ranks.removeprefix("2x")

    @property
    def title(self) -> str:
        """A line that names it."""
        return f"{self.collective}, {self.a_host} rank{'s' if self.a_host != '1' else ''} a host, {SPOKEN[self.rate]}"


TABLES = [
    Table(ranks, rate, collective)
    for collective, ranks, rate in itertools.product(COLLECTIVES, TRANSPORTS, RATES)
    if collective == "all_reduce" or rate in OTHERS_AT
]


# -- the runs ----------------------------------------------------------------------------------------------------------
def measure(table: Table, sizes: list[int], samples: int, peers: list[str]) -> dict:
    """The results of a table, as they are kept."""
    sizes = [size for size in sizes if size <= LARGEST.get(table.rate, size)]
    long = [size for size in sizes if size * 8 / RATES[table.rate] > LONG_SECONDS]
    few = max(1, samples // 4)
    plans = [([size for size in sizes if size not in long], ["-n", str(samples)])]
    plans.append((long, ["-n", str(few), "-w", "0", "--turns", str(few)]))
    reports = [bench(table, part, [*options, "--peers", ",".join(peers)]) for part, options in plans if part]
    return {
        "candidates": {name: about for report in reports for name, about in report["candidates"].items()},
        "missing": {name: reason for report in reports for name, reason in report["missing"].items()},
        "machine": reports[0]["machine"],
        "samples": [samples, few],
        "rows": [
            [row["size_bytes"], row["who"], row["buffers"], median(row["seconds"])]
            for report in reports
            for row in report["rows"]
        ],
    }


def bench(table: Table, sizes: list[int], options: list[str]) -> dict:
    """One run of `all-reduce`; DistoptError if distopt was not measured or a result was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = ["all-reduce", "--json", str(result), *options]
        command += ["--collective", table.collective, "--emulate", table.ranks, "--sizes", ",".join(map(str, sizes))]
        command += ["--transport", ",".join(TRANSPORTS[table.ranks])]
        command += [] if table.rate == "unshaped" else ["--rate", table.rate]
        code = main(command)
        if not result.exists():
            raise DistoptError(f"{' '.join(command)} ended with {code}")
        report = json.loads(result.read_text())
    wrong = [f"{row['who']} at {row['size_bytes']} bytes" for row in report["rows"] if row["wrong"]]
    if wrong:
        raise DistoptError(f"{table.title}: wrong results of {', '.join(wrong)}")
    for transport in TRANSPORTS[table.ranks]:
        if transport in report["missing"]:
            raise DistoptError(f"{table.title}: {transport} was not measured: {report['missing'][transport]}")
    return report


def library(result: dict) -> str:
    """Name and version of the MPI that distopt ran over."""
    return result["candidates"]["mpi"].partition(" over ")[2]


def key(table: Table, result: dict) -> str:
    """The key under which a result is kept: a later one with the same key replaces it, whatever the library's version."""
    return " ".join([own_peer(result), *astuple(table)])


def own_peer(result: dict) -> str:
    return next(peer for peer, name in PEERS.items() if library(result).startswith(name))


# -- the page ----------------------------------------------------------------------------------------------------------
def page(results: dict[str, dict]) -> str:
    """A table for each collective, over each MPI that distopt has run over."""
    parts = ["; ".join(dict.fromkeys(described(result) for result in results.values()))]
    for own in PEERS:
        found = [(table, results[name]) for table in TABLES if (name := " ".join([own, *astuple(table)])) in results]
        if found:
            parts.append(f"### distopt over {' and '.join(dict.fromkeys(library(result) for _, result in found))}")
        parts += [
            markdown(collective, [pair for pair in found if pair[0].collective == collective])
            for collective in dict.fromkeys(table.collective for table, _ in found)
        ]
    return "\n\n".join(parts)


def described(result: dict) -> str:
    facts, (short, long) = result["machine"], result["samples"]
    peers = ", ".join(result["candidates"][peer] for peer in PEERS if peer in result["candidates"])
    return (
        f"{facts['cores']} cores of {facts['processor']}, Linux {facts['kernel']}, Python {facts['python']}. Peers: "
        f"{peers}. Medians of {short} batches, of {long} where the link needs more than {LONG_SECONDS * 1e3:.0f} ms."
    )


def markdown(collective: str, found: list[tuple[Table, dict]]) -> str:
    """Rows by ranks, rate and transport, columns by size: the time in ms, and the best peer's time divided by it."""
    sizes = sorted({row[0] for _, result in found for row in result["rows"]})
    rows, missing = [], []
    for table, result in found:
        rivals = [own_peer(result), "gloo"]
        best: dict[tuple[int, str], float] = {}
        for size, who, buffers, seconds in result["rows"]:
            if who not in TRANSPORTS[table.ranks] or buffers == "wire":
                best[size, who] = min(seconds, best.get((size, who), math.inf))
        for transport in TRANSPORTS[table.ranks]:
            cells = []
            for size in sizes:
                own, rival = best.get((size, transport)), [best[size, who] for who in rivals if (size, who) in best]
                compared = f": {ratio(min(rival) / own)}" if own and rival else ""
                cells.append(f"{three_digits(1e3 * own)}{compared}" if own else "")
            rows.append([f"{table.a_host}, {SPOKEN[table.rate]}", transport, *cells])
        missing += [f"\nNot measured: {PEERS.get(name, name)}: {reason}" for name, reason in result["missing"].items()]
    head = ["ranks a host, rate", collective, *(f"{size:,}" for size in sizes)]
    return "\n".join([output.table(head, rows), *dict.fromkeys(missing)])


def three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="WORDS", help="tables with all of these, as 2x1,1gbit,all_reduce")
    parser.add_argument("--samples", type=at_least(1), default=20, help="batches per size (20)")
    parser.add_argument("--sizes", type=byte_sizes, default=SIZES, help="bytes, as 4K,1M (256 to 25600000)")
    parser.add_argument("--peers", type=names_of(PEERS), default=list(PEERS), help=f"(all: {','.join(PEERS)})")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "collectives.json", help="of all runs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/network.md", help="page with the marks")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the page from --results")


def run(args: argparse.Namespace) -> None:
    words = {word for word in args.only.split(",") if word}
    tables = [] if args.write else [table for table in TABLES if words <= set(astuple(table))]
    if not (tables or args.write):
        raise UsageError(
            f"--only {args.only} names no table; known are {', '.join([*TRANSPORTS, *RATES, *COLLECTIVES])}"
        )
    if tables and os.geteuid() != 0:
        raise UsageError("only root can create network namespaces; run it with sudo")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for number, table in enumerate(tables, 1):
        print(f"## {number} of {len(tables)}: {table.title}", flush=True)
        result = measure(table, args.sizes, args.samples, args.peers)
        results[key(table, result)] = result
        write_json(args.results, results)
        put(args.output, "collectives", page(results))
    put(args.output, "collectives", page(results))
