"""The cost of the flight record and of the timeline, for a small collective and for a training step.

An operation of a communicator whose transport does nothing is called with and without a record, and the timeline gets
bars that it writes to a file. Then a job trains the reference CNN, and its steps take turns: without recorders, with
the flight record, with both. Other processes disturb all three alike. Printed are ratios of lower deciles and medians.

    python -m benchmarks recorder --steps 600
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

from distopt import opt
from distopt.cli.values import at_least
from distopt.comm.native import NativeCommunicator
from distopt.comm.shm import ShmCommunicator
from distopt.flight import FlightRecord
from distopt.timeline import Timeline, timeline

CALLS, REPEATS, WARM_UP_STEPS = 2000, 25, 30
KINDS = ("no recorder", "flight record", "flight record and timeline")


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


def train(steps: int, batch_size: int) -> None:
    """As a rank. Print the ratios."""
    from .models import CNN, compiled, sgd

    optimizer = opt.DistOpt(sgd())
    net, x, y = compiled(optimizer, batch_size, net=CNN())
    record = optimizer.communicator.flight
    took: list[list[float]] = [[] for _ in KINDS]
    for step in range(WARM_UP_STEPS + steps):
        kind = step % len(KINDS)
        optimizer.communicator.flight = None if kind == 0 else record
        timeline.is_on = kind == len(KINDS) - 1
        began = perf_counter()
        net(x, y)
        if step >= WARM_UP_STEPS:
            took[kind].append(perf_counter() - began)
    timeline.is_on = True
    if optimizer.global_rank == 0:
        decile, middle = [
            [rule(each) for each in took] for rule in (lambda each: sorted(each)[len(each) // 10], median)
        ]
        for kind, name in enumerate(KINDS):
            ratios = f"{decile[kind] / decile[0]:.3f} (lower deciles), {middle[kind] / middle[0]:.3f} (medians)"
            print(f"{name}: {middle[kind] * 1e3:.2f} ms a step, {ratios}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--batch-size", type=at_least(1), default=64)
    parser.add_argument("--steps", type=at_least(30), default=600, help="of all kinds together (600)")


def run(options: argparse.Namespace) -> None:
    communicator = object.__new__(ShmCommunicator)
    communicator.core = SimpleNamespace(all_reduce_plain=lambda *_: True, next_number=1)
    without = seconds_a_call(communicator)
    record = FlightRecord()
    communicator.flight = record.open_group("world", [0, 1], 0, [record.offer()])
    print(f"an operation noted: {(seconds_a_call(communicator) - without) * 1e6:.2f} us")
    print(f"a bar of the timeline: {seconds_a_bar() * 1e6:.2f} us", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "distopt", "run", "--nproc-per-node", str(options.np), "--timeline", folder]
        words = ["-m", "benchmarks.recorder", str(options.steps), str(options.batch_size)]
        subprocess.run([sys.executable, *launcher, *words], check=True)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
