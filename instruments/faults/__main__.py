"""Faults of every kind, for every way to start ranks, at random moments: does the job end, say why, leave nothing?

python -m instruments.faults --trials 500

Draws as many trials, first one of each kind, then of others of the pairs of kind and way; runs them side by side;
prints a table, and all that a trial has written in which something did not hold. Two hosts are network namespaces and
need root; without it, these ways are left out.
"""

import argparse
import contextlib
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice

from benchmarks.networks.emulation import HostsUnavailableError, TwoHosts, two_hosts
from tests.processes import heed_signals, is_open_mpi

from .kinds import KINDS
from .trials import Outcome, Trial, is_possible, run
from .ways import WAYS, possible_ways


def draw(rng: random.Random, kinds: Iterable[str], ways: Iterable[str]) -> Iterator[Trial]:
    """Trials without end: in turn one of each kind, each time with the next of its ways, in random order."""
    ways = list(ways)
    turns: dict[str, list[str]] = {kind: [] for kind in kinds if any(is_possible(kind, way) for way in ways)}
    while True:
        for kind in rng.sample(list(turns), len(turns)):
            if not turns[kind]:
                turns[kind] = rng.sample(possible := [way for way in ways if is_possible(kind, way)], len(possible))
            yield Trial.draw(rng, kind, turns[kind].pop())


@contextlib.contextmanager
def hosts(count: int) -> Iterator[queue.SimpleQueue[TwoHosts]]:
    """As many pairs of hosts, or none where they cannot be made."""
    pairs: queue.SimpleQueue[TwoHosts] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        try:
            for number in range(count):
                pairs.put(stack.enter_context(two_hosts(f"-{number}")))
        except HostsUnavailableError as error:
            print(f"without the ways over two hosts: {error}", flush=True)
        yield pairs


def run_all(trials: Sequence[Trial], jobs: int, pairs: queue.SimpleQueue[TwoHosts]) -> Iterator[Outcome]:
    """The outcomes, as they come."""

    def run_one(trial: Trial) -> Outcome:
        if WAYS[trial.way].hosts == 1:
            return run(trial)
        net = pairs.get()
        try:
            return run(trial, net)
        finally:
            pairs.put(net)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_one, trial) for trial in trials]):
            yield future.result()


# -- table -----------------------------------------------------------------------------------------------------------
COUNTS = {
    "n": lambda outcome: True,
    "unnamed": lambda outcome: outcome.unnamed,
    "left over": lambda outcome: bool(outcome.left),
    "hangs": lambda outcome: outcome.hangs,
    "exits 0": lambda outcome: outcome.ends_well,
    "other": lambda outcome: bool(outcome.others) and not outcome.hangs,
}


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown: a line per kind, a column per way with number, median and maximum of seconds."""
    ways = [name for name in WAYS if any(o.trial.way == name for o in outcomes)]
    rows = [["kind", *ways, *COUNTS], ["---"] * (1 + len(ways) + len(COUNTS))]
    lines = {kind: [o for o in outcomes if o.trial.kind == kind] for kind in KINDS} | {"all": outcomes}
    for name, these in lines.items():
        if these:
            cells = [cell([o for o in these if o.trial.way == way]) for way in ways]
            rows.append([name, *cells, *(str(sum(test(o) for o in these)) for test in COUNTS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(outcomes: Sequence[Outcome]) -> str:
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    times = f": {statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""
    return f"{len(outcomes)}{times}" if outcomes else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instruments.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, separated by commas")
    parser.add_argument("--trial", action="append", type=Trial.parse, help="this one, as a failure prints it")
    parser.add_argument("--verbose", action="store_true", help="print what every job has written")
    options = parser.parse_args()
    heed_signals()
    began = time.monotonic()
    outcomes = []
    with hosts(options.jobs) as pairs:
        ways = [way for way in possible_ways(hosts=not pairs.empty()) if way in options.ways.split(",")]
        drawn = draw(random.Random(options.seed), options.kinds.split(","), ways)
        trials = options.trial or list(islice(drawn, options.trials))
        print(f"--seed {options.seed}, {'Open MPI' if is_open_mpi() else 'MPICH'}", flush=True)
        for outcome in run_all(trials, options.jobs, pairs):
            outcomes.append(outcome)
            if len(outcomes) % 50 == 0:
                print(f"{len(outcomes)} of {len(trials)}", file=sys.stderr, flush=True)
            if outcome.faults or options.verbose:
                print(
                    f"python -m instruments.faults --trial '{outcome.trial}': {outcome.faults}\n{outcome.output}\n",
                    flush=True,
                )
    print(table(outcomes))
    failed = sum(bool(outcome.faults) for outcome in outcomes)
    print(f"\n{len(outcomes)} trials in {time.monotonic() - began:.0f} s; in {failed} something did not hold")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
