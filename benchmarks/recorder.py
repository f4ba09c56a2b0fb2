"""The cost of the flight record and of the timeline, for a small collective and for a training step.

The timeline gets bars that it writes to a file. Then a job calls all_reduce of 1 KiB, by a communicator and by PyTorch
if it is installed, with and without a record in turns; printed are differences of the fastest turns. Then it trains the
reference CNN, and its steps take turns: without recorders, with the flight record, with both. Other processes disturb
all three alike. Printed are ratios of lower deciles and medians.

    python -m benchmarks recorder --steps 600
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from time import perf_counter

import numpy as np

from distopt import opt
from distopt.cli.values import at_least
from distopt.comm import Communicator
from distopt.recorder.timeline import Timeline, timeline

CALLS, REPEATS, WARM_UP_STEPS = 2000, 25, 30
CALLS_A_TURN, TURNS, SMALL = 50, 600, 256
KINDS = ("no recorder", "flight record", "flight record and timeline")


def print_cost_of_a_note(name: str, communicator: Communicator, all_reduce: Callable[[], object]) -> None:
    """As a rank. `all_reduce` is carried out by the communicator."""
    record, took = communicator.flight, (list[float](), list[float]())
    for _ in range(TURNS):
        for each, communicator.flight in zip(took, (None, record), strict=True):
            began = perf_counter()
            for _ in range(CALLS_A_TURN):
                all_reduce()
            each.append((perf_counter() - began) / CALLS_A_TURN)
    if communicator.topology.rank == 0:
        without, noted = (min(each) * 1e6 for each in took)  # other processes only add to it
        print(f"a small collective{name}: {without:.2f} us, noted {noted - without:.2f} us more", flush=True)


def small_collectives_of_torch() -> None:
    """As a rank. Print the cost."""
    import torch
    import torch.distributed as dist

    import distopt.torch  # noqa: F401 - registers the backend

    dist.init_process_group("distopt")
    tensor = torch.zeros(SMALL)
    communicator = dist.distributed_c10d._get_default_group()._channels.first.communicator
    print_cost_of_a_note(" of PyTorch", communicator, lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()


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
    zeros = np.zeros(SMALL, np.float32)
    print_cost_of_a_note("", optimizer.communicator, lambda: optimizer.communicator.all_reduce(zeros).wait())
    if find_spec("torch"):
        small_collectives_of_torch()
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
    print(f"a bar of the timeline: {seconds_a_bar() * 1e6:.2f} us", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "distopt", "run", "--nproc-per-node", str(options.np), "--timeline", folder]
        words = ["-m", "benchmarks.recorder", str(options.steps), str(options.batch_size)]
        subprocess.run([sys.executable, *launcher, *words], check=True)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
