"""All-reduce between hosts far apart: PyTorch over Gloo and over distopt, and the least time.

One rank on each host. All take turns in one run; a time is that from when the last rank begins a sum to when the last has
the result, and the median over the turns. "The link allows" is the lesser time of two schedules among H hosts, with b the
seconds in which a host sends the array once, headers of TCP and IP included, and d the delay in one direction:

- each host sends its array to all others: (H - 1) b + d;
- each sums its share of the array and sends the sum to all others, in pieces, so that the second phase overlaps the
  first: the greater of 2 (H - 1) / H b + d, which is the rate, and (H - 1) / H b + 2 d, which is the delays.

Recursive doubling, ceil(log2 H) (b + d), is never faster than both. Lost packets are not in it. A connection that was idle
first sends little (the slow start of TCP; BBR also spaces packets by the rate at which the connection has sent): each turn
begins with untimed sums.

The hosts are network namespaces of this machine; see `networks.far`. Needs root, PyTorch and the extra "hosts".

    sudo .venv/bin/python -m benchmarks distance
    sudo .venv/bin/python -m benchmarks distance --hosts 4 --delay 100 --loss 0.1 --sizes 64KiB,1MiB --load 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from distopt.cli.values import at_least

from .networks.emulation import LINK
from .networks.far import DATA_BYTES, PACKET_BYTES, Link, add_link, far_hosts, link_of, number_of_hosts
from .networks.site import NamespaceSite
from .options import byte_sizes
from .output import heading, machine, put, table, write_json
from .peers.crew import Crew
from .peers.lineup import Lineup, Setup, torch_crew

SIZES = "1KiB,64KiB,1MiB,4MiB,16MiB"
SAMPLES, WARM_UP = 3, 1  # sums in each turn
# Label: backend of PyTorch's group.
CANDIDATES = {"Gloo": "gloo", "distopt": "distopt"}
GLOO, OURS = CANDIDATES
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
ALLOWED = "the link allows"
# Keeps a core busy as long as the process that started it lives.
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=numbers_of_hosts, default=[2, 4], metavar="H,H", help="numbers of hosts (2,4)")
    add_link(parser)
    parser.add_argument("--sizes", type=byte_sizes, default=byte_sizes(SIZES), help=f"of the arrays ({SIZES})")
    parser.add_argument("--turns", type=at_least(1), default=7, metavar="N", help="turns of each candidate (7)")
    parser.add_argument("--load", type=at_least(0), default=0, metavar="N", help="busy loops on each core (0)")
    parser.add_argument(
        "--output", type=Path, metavar="PAGE", help="write the table between the marks of this page, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 0 if everything could be measured, and was right."""
    facts, link = machine(), link_of(args)
    conditions = f"{link}; TCP of this kernel: {Path(CONGESTION).read_text().strip()}"
    if args.load:
        conditions += f"; busy loops on each core: {args.load}"
    if streams := os.environ.get("DISTOPT_STREAMS"):
        conditions += f"; DISTOPT_STREAMS={streams}"
    print(f"# {heading(facts)}\n# {conditions}; medians of {args.turns} turns, in ms", flush=True)
    head = ["hosts", "bytes", *CANDIDATES, ALLOWED, f"{GLOO} / {OURS}", f"{OURS} / {ALLOWED}"]
    rows: list[list[str]] = []
    turns: dict[str, dict[str, list[float]]] = {}
    notes: list[str] = []
    print(table(head, []), flush=True)
    for n_hosts in args.hosts:
        with far_hosts(n_hosts, link) as hosts, Lineup() as lineup:
            fill(lineup, NamespaceSite(hosts, 1))
            lineup.enter_context(busy(args.load))
            for size in args.sizes:
                found = measure(lineup, size, args.turns, notes)
                turns[f"{n_hosts} hosts, {size} bytes"] = found
                rows.append([str(n_hosts), f"{size:,}", *cells(found, least_seconds(n_hosts, size, link))])
                print(f"| {' | '.join(rows[-1])} |", flush=True)
            notes += [f"not measured between {n_hosts} hosts: {x}: {why}" for x, why in lineup.missing.items()]
    print("".join(f"# {note}\n" for note in notes), end="")
    if args.output and not notes:
        machine_line = f"{facts['cores']} cores of {facts['processor']}, Linux {facts['kernel']}."
        text = f"{machine_line} {conditions}. Medians of {args.turns} turns, in ms."
        put(args.output, "distance", f"{text}\n\n{table(head, rows)}")
    if args.json:
        facts |= {"conditions": conditions}
        write_json(args.json, {"benchmark": "distance", "machine": facts, "link": link, "seconds": turns})
    return 1 if notes else 0


def least_seconds(n_hosts: int, n_bytes: int, link: Link) -> float:
    """Seconds that the link allows an all-reduce of `n_bytes` on each host; see the text of this module."""
    once, delay = n_bytes * PACKET_BYTES / DATA_BYTES / link.rate, link.delay
    others, share = n_hosts - 1, (n_hosts - 1) / n_hosts
    return min(others * once + delay, max(2 * share * once + delay, share * once + 2 * delay))


def fill(lineup: Lineup, site: NamespaceSite) -> None:
    """Start the candidates."""

    def start(group: str) -> tuple[Crew, Setup]:
        crew, setup = torch_crew("all_reduce", site, group="distopt")
        return crew, {**setup, "group": group}

    for name, group in CANDIDATES.items():
        lineup.add(name, partial(start, group))


def measure(lineup: Lineup, size: int, turns: int, notes: list[str]) -> dict[str, list[float]]:
    """Seconds of a sum of `size` bytes in each turn, for each candidate; adds to `notes` whose sums are wrong."""
    array = {"collective": "all_reduce", "buffers": "in place", "dtype": "float32", "calls": 1, "interface": LINK}
    count = max(size // 4, 1)
    request = {**array, "count": count, "capacity": count, "warm_up": WARM_UP, "samples": SAMPLES}
    answers: dict[str, list[list[dict[str, Any]]]] = {candidate.name: [] for candidate in lineup.candidates}
    lineup.take_turns(turns, lambda candidate, _: answers[candidate.name].append(candidate.crew.ask(request)))
    left = [candidate.name for candidate in lineup.candidates]
    wrong = [name for name in left if any(rank["wrong"] for ranks in answers[name] for rank in ranks)]
    notes += [f"{name}: sums of {size:,} bytes are wrong" for name in wrong]
    return {name: [seconds_of(ranks) for ranks in answers[name]] for name in left}


def seconds_of(ranks: list[dict[str, Any]]) -> float:
    """The median over the sums of a turn, from when the last rank begins to when the last has the result.

    The hosts share a clock. A barrier lets ranks go at different times, by up to a delay.
    """
    begins = zip(*(rank["begins"] for rank in ranks), strict=True)
    seconds = zip(*(rank["seconds"] for rank in ranks), strict=True)
    return median(
        max(begin + spent for begin, spent in zip(first, each, strict=True)) - max(first)
        for first, each in zip(begins, seconds, strict=True)
    )


def cells(found: dict[str, list[float]], least: float) -> list[str]:
    """The cells of a row after the size."""
    times = {name: median(each) for name, each in found.items()}
    written = [milliseconds(times[name]) if name in times else "" for name in CANDIDATES]
    gained = f"{times[GLOO] / times[OURS]:.2f}" if {GLOO, OURS} <= {*times} else ""
    return [*written, milliseconds(least), gained, f"{times[OURS] / least:.2f}" if OURS in times else ""]


def milliseconds(seconds: float) -> str:
    """In a table: with one decimal, or none from 100 on."""
    return f"{seconds * 1e3:,.{1 if seconds < 0.1 else 0}f}"


@contextmanager
def busy(per_core: int) -> Iterator[None]:
    """Keep all cores busy with that many loops each."""
    # Each in a session of its own, as ranks are: some kernels share cores by session first.
    loop = [sys.executable, "-c", LOOP, str(os.getpid())]
    n_loops = per_core * len(os.sched_getaffinity(0))
    loops: list[subprocess.Popen[bytes]] = []
    try:
        loops += (subprocess.Popen(loop, start_new_session=True) for _ in range(n_loops))
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def numbers_of_hosts(text: str) -> list[int]:
    """The numbers of "2,4"; see `number_of_hosts`."""
    return [number_of_hosts(word) for word in text.split(",")]
