"""Resident memory of a training rank over many steps of the reference CNN, distopt beside PyTorch DDP over Gloo.

Rss counts every page that the process has mapped and touched, shared ones too; Pss divides these among the processes
that share them. The largest of the ranks is printed, after the first steps and then at even distances.

    python -m benchmarks memory --np 2 --batch-size 64 --steps 2000
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

from distopt.cli.values import at_least

from .networks.site import Site
from .peers.lineup import Lineup
from .train import crew_of

FIRST_STEPS, SAMPLES = 10, 8
PEERS = ("distopt", "torch-ddp")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--batch-size", type=at_least(1), default=64, metavar="N", help="samples per rank (64)")
    parser.add_argument("--steps", type=at_least(FIRST_STEPS + 1), default=2000, metavar="N", help="(2000)")
    parser.add_argument("--only", choices=PEERS, help="measure one of the two")


def run(args: argparse.Namespace) -> None:
    args.transport = "shm"
    ends = {FIRST_STEPS + (args.steps - FIRST_STEPS) * i // SAMPLES for i in range(SAMPLES + 1)}
    for name in [args.only] if args.only else PEERS:
        with Lineup() as lineup:
            lineup.add(name, partial(crew_of, name, Site(args.np), args))
            print(f"{name}: largest of {args.np} ranks, batch {args.batch_size}")
            print(f"{'steps':>8} {'Rss MiB':>9} {'Pss MiB':>9}")
            for done, until in pairwise([0, *sorted(ends)]):
                answers = lineup.ask(1, {"steps": until - done, "warm_up": 0})[name][0]
                sizes = zip(*(answer["now_bytes"] for answer in answers), strict=True)
                rss, pss = (max(each) / 2**20 for each in sizes)
                print(f"{until:8} {rss:9.1f} {pss:9.1f}", flush=True)
