"""What finding failures costs a training step, as a share of it.

python benchmarks/cost_of_checks.py 2          shared memory
mpiexec -n 2 python benchmarks/cost_of_checks.py    MPI

A barrier moves no data: it posts a fingerprint, waits for those of the others, compares them, and watches that its
peers live. So (collectives per step) * (time of a barrier) is more than the checks cost, because ranks would have to
meet without them, too. Step and barrier are measured in one run, in turn.
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

ROUNDS, STEPS, BARRIERS = 10, 5, 200


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
    steps, barriers = [], []
    for _ in range(ROUNDS):
        steps.append(seconds_per_call(lambda: model(x, y), STEPS))
        barriers.append(seconds_per_call(communicator.barrier, BARRIERS))
    if rank == 0:
        step, barrier = np.median(steps), np.median(barriers)
        print(
            f"{communicator.name}, {world_size} ranks: step {step * 1e3:.2f} ms with {collectives} collectives, "
            f"barrier {barrier * 1e6:.1f} us, checks at most {collectives * barrier / step:.2%} of a step"
        )
    communicator.barrier()


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
        def wrapper(*args):
            nonlocal count
            count += 1
            return method(*args)

        return wrapper

    names = [
        "_all_reduce",
        "_all_reduce_and_look",
        "_all_gather",
        "_all_gather_ragged",
        "_reduce_scatter",
        "_broadcast",
    ]
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
