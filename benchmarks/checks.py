"""The cost of finding failures and drift, as a share of a training step.

    python -m benchmarks checks --np 2             shared memory
    mpiexec -n 2 python -m benchmarks checks       MPI

A barrier moves no data: it posts a fingerprint, waits for those of the others, compares them, and watches that its
peers live. So (collectives per step) * (time of a barrier) is more than the checks of collectives cost, because ranks
would have to meet without them, too. What finds drift is measured by itself:

- constants: every step gathers the constants of the optimizer, compares them with what the ranks have agreed on, and
  enters and leaves the context that explains errors;
- labels: every collective of a step asks for its label, which would name a change;
- order: the number of the `DistOpt` is a part of the labels of all but the first one, and compared with them; the time is
  that of making a label with a number anew;
- digests: the comparison of all parameters, divided by the number of steps from one to the next.

Step and parts are measured in one run, in turn.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from unittest import mock

import numpy as np

from distopt import comm, launch, opt
from distopt.cli.values import at_least

from .models import compiled, sgd

STEPS, BARRIERS, CALLS, COMPARISONS = 5, 200, 2000, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), metavar="N", help="ranks to start, without a launcher (2)")
    parser.add_argument("--rounds", type=at_least(1), default=10, metavar="N", help="(10)")


def run(args: argparse.Namespace) -> None:
    if launch.launcher() is None:
        launch.main(measure_new, args.np or 2, (args.rounds,))
    else:
        launch.main(measure, args=("mpi", args.rounds))


def measure_new(_rank: int, _world_size: int, rounds: int) -> None:
    measure("shm", rounds)


def measure(transport: str, rounds: int) -> None:
    """Collective. Rank 0 prints."""
    communicator = comm.create(launch.join(), os.environ.get("DISTOPT_TRANSPORT", transport))
    topology = communicator.topology
    optimizer = opt.DistOpt(sgd(), communicator=communicator)
    model, x, y = compiled(optimizer, 64)
    collectives = count_collectives(communicator, lambda: model(x, y))
    assert collectives, "a step starts no collective"
    agreement, statistics = optimizer._engine.agreement, optimizer._engine.statistics
    parts = {
        "collectives": (communicator.barrier, BARRIERS, collectives),
        "constants": (lambda: look(agreement, statistics, optimizer.opt), CALLS, 1),
        "labels": (lambda: agreement.label("bucket 0: linear2.b ... linear1.W"), CALLS, collectives),
        "order": (lambda: f"{agreement.prefix}bucket 0", CALLS, collectives),
        "digests": (lambda: agreement.compare([*model.get_params().values()], 0), COMPARISONS, 1 / agreement.every),
    }
    model(x, y)
    steps = []
    seconds = {name: [] for name in parts}
    for _ in range(rounds):
        steps.append(seconds_per_call(lambda: model(x, y), STEPS))
        for name, (call, repeats, per_step) in parts.items():
            seconds[name].append(seconds_per_call(call, repeats) * per_step)
    if topology.rank == 0:
        step = np.median(steps)
        print(
            f"{communicator.name}, {topology.world_size} ranks: step {step * 1e3:.2f} ms with {collectives} collectives"
        )
        costs = {name: np.median(times) for name, times in seconds.items()}
        drift = sum(cost for name, cost in costs.items() if name != "collectives")
        for name, cost in {**costs, "drift (all but collectives)": drift}.items():
            print(f"{name}: {'at most ' * (name == 'collectives')}{cost * 1e6:.2f} us, {cost / step:.3%} of a step")
    communicator.barrier()


def look(agreement, statistics, slots) -> None:
    """The beginning of a step."""
    with agreement.explained():
        agreement.note_constants(slots.constants(), statistics.steps - statistics.skipped)


def seconds_per_call(call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def count_collectives(communicator, call) -> int:
    """How many collectives `call` starts, from its second time on."""
    call()
    names = ["all_reduce", "all_gather", "all_gather_ragged", "all_to_all_ragged", "reduce_scatter", "broadcast"]
    with ExitStack() as stack:
        patches = [mock.patch.object(communicator, name, wraps=getattr(communicator, name)) for name in names]
        counted = [stack.enter_context(patch) for patch in patches]
        call()
    return sum(each.call_count for each in counted)
