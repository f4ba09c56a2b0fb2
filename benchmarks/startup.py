"""Start-up of a job of 2 x 2 ranks on two hosts, by `distopt run` and by mpiexec of MPICH, in one run.

    sudo .venv/bin/python -m benchmarks startup

The hosts are network namespaces. Each job joins, sums one number over the ranks, and ends; the time is that of the
whole command, from its start to the end of its last process. Rounds take turns; the medians and their ratio are shown.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from distopt.cli.values import at_least
from distopt.errors import DistoptError

from .networks.emulation import TwoHosts, two_hosts
from .output import import_this_checkout

RANKS_PER_HOST = 2
JOB = """
import numpy
import distopt
world = distopt.init()
total = world.all_reduce(numpy.ones(1, numpy.float32))
assert total == 4, total
"""


def by_mpiexec(net: TwoHosts, script: str) -> list[list[str]]:
    return [net.mpiexec(RANKS_PER_HOST, [sys.executable, script])]


def by_distopt_run(net: TwoHosts, script: str) -> list[list[str]]:
    run = [sys.executable, "-m", "distopt", "run", "--nnodes", "2", "--nproc-per-node", str(RANKS_PER_HOST)]
    line = [*run, "--rdzv-endpoint", f"{net.hosts[0].address}:29400", script]
    return [host.inside(line) for host in net.hosts]


def seconds(commands: list[list[str]]) -> float:
    began = time.monotonic()
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    codes = [process.wait() for process in started]
    if any(codes):
        raise DistoptError(f"exit codes {codes}: see the output")
    return time.monotonic() - began


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="(7)")


def run(args: argparse.Namespace) -> None:
    ways = {"mpiexec": by_mpiexec, "distopt run": by_distopt_run}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with two_hosts() as net:
        script = net.launcher.with_name("job.py")
        script.write_text(JOB)
        import_this_checkout()
        for _ in range(args.rounds):
            for name, commands in ways.items():
                times[name].append(seconds(commands(net, str(script))))
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        print(f"{name:12} {median:.2f} s ({spread})")
    print(f"ratio        {medians['distopt run'] / medians['mpiexec']:.2f}")
