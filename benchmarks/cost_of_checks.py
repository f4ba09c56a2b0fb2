"""What finding failures and drift costs a training step, as a share of it.

python benchmarks/cost_of_checks.py 2          shared memory
mpiexec -n 2 python benchmarks/cost_of_checks.py    MPI

A barrier moves no data: it posts a fingerprint, waits for those of the others, compares them, and watches that its
peers live. So (collectives per step) * (time of a barrier) is more than the checks of collectives cost, because ranks
would have to meet without them, too. What finds drift is measured by itself:

- constants: every step gathers the constants of the optimizer, compares them with what the ranks have agreed on, and
  enters and leaves the context that explains errors;
- labels: every collective of a step asks for its label, in which a change would be told;
- order: the number of the `DistOpt` is a part of the labels of all but the first one, and compared with them; the time is
  that of making a label with a number anew;
- digests: the comparison of all parameters, divided by the number of steps from one to the next.

Step and parts are measured in one run, in turn.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from distopt import comm, launch, opt, singa_wrap, tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_cnn

ROUNDS, STEPS, BARRIERS, CALLS, COMPARISONS = 10, 5, 200, 2000, 5


def measure(rank: int, world_size: int, ticket) -> None:
    job = launch.join(ticket, rank, world_size) if ticket else launch.join()
    communicator = comm.create(job, os.environ.get("DISTOPT_BACKEND", "shm" if ticket else "mpi"))
    optimizer = opt.DistOpt(opt.SGD(lr=0.005, momentum=0.9), communicator=communicator)
    model = train_cnn.CNN()
    model.set_optimizer(optimizer)
    rng = np.random.default_rng(rank)
    x = tensor.from_numpy(rng.standard_normal((64, 1, 28, 28), np.float32))
    y = tensor.from_numpy(rng.integers(0, 10, 64, np.int32))
    model.compile([x], is_train=True, use_graph=False, sequential=False)
    collectives = count_collectives(communicator, lambda: model(x, y))
    assert collectives, "a step starts no collective"
    engine = optimizer._engine
    parts = {
        "collectives": (communicator.barrier, BARRIERS, collectives),
        "constants": (lambda: look(engine, optimizer.opt), CALLS, 1),
        "labels": (lambda: engine.drift.label("bucket 0: linear2.b ... linear1.W"), CALLS, collectives),
        "order": (lambda: f"{engine.drift.prefix}bucket 0", CALLS, collectives),
        "digests": (
            lambda: engine.drift.compare([*model.get_params().values()], 0),
            COMPARISONS,
            1 / engine.drift.every,
        ),
    }
    model(x, y)
    steps = []
    seconds = {name: [] for name in parts}
    for _ in range(ROUNDS):
        steps.append(seconds_per_call(lambda: model(x, y), STEPS))
        for name, (call, repeats, per_step) in parts.items():
            seconds[name].append(seconds_per_call(call, repeats) * per_step)
    if rank == 0:
        step = np.median(steps)
        print(f"{communicator.name}, {world_size} ranks: step {step * 1e3:.2f} ms with {collectives} collectives")
        costs = {name: np.median(times) for name, times in seconds.items()}
        drift = sum(cost for name, cost in costs.items() if name != "collectives")
        for name, cost in {**costs, "drift (all but collectives)": drift}.items():
            print(f"{name}: {'at most ' * (name == 'collectives')}{cost * 1e6:.2f} us, {cost / step:.3%} of a step")
    communicator.barrier()


def look(engine, slots) -> None:
    """What begins a step."""
    with engine.drift:
        engine.drift.look(slots.constants(), engine.progress.steps - engine.progress.skipped)


def seconds_per_call(call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def count_collectives(communicator, call) -> int:
    """How many collectives `call` starts, from its second time on."""
    call()
    count = 0

    def counted(method):
        def wrapper(*args, **options):
            nonlocal count
            count += 1
            return method(*args, **options)

        return wrapper

    names = ["all_reduce", "all_gather", "all_gather_ragged", "all_to_all_ragged", "reduce_scatter", "broadcast"]
    for name in names:
        setattr(communicator, name, counted(getattr(communicator, name)))
    call()
    for name in names:
        delattr(communicator, name)
    return count


def measure_here() -> None:
    info = launch.launcher()
    measure(info.rank if info else 0, info.size if info else 1, None)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        launch.main(measure, int(sys.argv[1]), (singa_wrap.NcclIdHolder(),))
    else:
        launch.main(measure_here)
