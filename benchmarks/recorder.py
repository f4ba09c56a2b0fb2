"""The cost of the flight record for a small collective, and of the timeline for a training step.

An operation of a communicator whose transport does nothing is called with and without a record, and the timeline gets
bars that it writes to a file. Then pairs of jobs train the reference CNN one after the other, with and without what is
measured; ratios of the lower deciles of their steps, which the load of other processes hardly touches.

    python -m benchmarks recorder --pairs 5
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter
from types import SimpleNamespace

import numpy as np

from distopt.cli.values import at_least
from distopt.comm.native import NativeCommunicator
from distopt.comm.shm import ShmCommunicator
from distopt.flight import FlightRecord
from distopt.timeline import Timeline

CALLS, REPEATS = 2000, 25
KINDS = {
    "nothing against nothing": ({"DISTOPT_FLIGHT_RECORDS": "0"}, {"DISTOPT_FLIGHT_RECORDS": "0"}),
    "flight record": ({}, {"DISTOPT_FLIGHT_RECORDS": "0"}),
    "timeline and flight record": ({"DISTOPT_TIMELINE": "build/recorder"}, {"DISTOPT_FLIGHT_RECORDS": "0"}),
}


def seconds_a_call(communicator: NativeCommunicator) -> float:
    array, took = np.ones(4, np.float32), []
    for _ in range(REPEATS):
        began = perf_counter()
        for _ in range(CALLS):
            communicator.all_reduce(array)
        took.append((perf_counter() - began) / CALLS)
    return min(took)  # other processes only add to it


def seconds_a_bar() -> float:
    made, took = Timeline(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DISTOPT_TIMELINE"] = folder
        made.open(0, ["a host"], lambda _: [])
        del os.environ["DISTOPT_TIMELINE"]
        for _ in range(REPEATS):
            began = perf_counter()
            for _ in range(CALLS):
                made.add("wait", began, perf_counter(), bucket="bucket 0: conv1.W")
            took.append((perf_counter() - began) / CALLS)
    return min(took)


def seconds_a_step(options: argparse.Namespace, env: dict[str, str]) -> float:
    words = ["-m", "benchmarks.recorder", str(options.steps), str(options.batch_size)]
    launcher = ["-m", "distopt", "run", "--nproc-per-node", str(options.np)]
    done = subprocess.run(
        [sys.executable, *launcher, *words], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def train(steps: int, batch_size: int) -> None:
    """As a rank: print the lower decile of the time of a step."""
    from distopt import opt

    from .models import CNN, compiled, sgd

    optimizer = opt.DistOpt(sgd())
    net, x, y = compiled(optimizer, batch_size, net=CNN())
    took = []
    for _ in range(steps):
        began = perf_counter()
        net(x, y)
        took.append(perf_counter() - began)
    if optimizer.global_rank == 0:
        print(sorted(took[steps // 5 :])[len(took) // 10])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--batch-size", type=at_least(1), default=64)
    parser.add_argument("--steps", type=at_least(5), default=150, help="of a job (150)")
    parser.add_argument("--pairs", type=at_least(0), default=5, help="of jobs (5)")


def run(options: argparse.Namespace) -> None:
    communicator = object.__new__(ShmCommunicator)
    communicator.core = SimpleNamespace(all_reduce_plain=lambda *_: True, next_number=1)
    without = seconds_a_call(communicator)
    record = FlightRecord()
    communicator.flight = record.open_group("world", [0, 1], 0, [record.offer()])
    print(f"an operation noted: {(seconds_a_call(communicator) - without) * 1e6:.2f} us")
    print(f"a bar of the timeline: {seconds_a_bar() * 1e6:.2f} us")
    for name, (env, other) in KINDS.items() if options.pairs else ():
        ratios = [seconds_a_step(options, env) / seconds_a_step(options, other) for _ in range(options.pairs)]
        print(f"{name}: {median(ratios):.3f} of a step (median of {min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
