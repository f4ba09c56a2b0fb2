"""A small training run in which one rank goes wrong as its arguments say. Run by `tests.faults.cases`.

python -m tests.faults.job START FAULT PLACE WORLD_SIZE RANK DELAY

START: main (`distopt.launch.main`), raw (`multiprocessing.Process`, as in SINGA's documentation), mpiexec (this process
is a rank already). RANK goes wrong, at PLACE: launch (before MPI_Init), start (before the ranks have met), inside (a
collective) or between (two steps). DELAY: seconds into the collective.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distopt import device, launch, layer, model, opt, singa_wrap, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3
LARGE = 4_000_003  # elements: a collective that other threads can hit


class Plan(NamedTuple):
    start: str
    fault: str
    place: str
    world_size: int
    rank: int
    delay: float


class Net(model.Model):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = layer.Linear(width, activation="RELU")
        self.out = layer.Linear(3)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.out(self.hidden(x))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        # Two buckets, so that there is an order that a rank can get wrong.
        self.optimizer.backward_and_update(loss, threshold=20)
        return out, loss


def train(rank: int, world_size: int, ticket, plan: Plan) -> None:
    faulty = rank == plan.rank
    if faulty and plan.place == "start":
        go_wrong(plan)
    optimizer = opt.DistOpt(opt.SGD(lr=0.1), ticket, rank if ticket else None, world_size if ticket else None)
    assert (optimizer.global_rank, optimizer.world_size) == (rank, world_size)
    net = Net(width=7 if faulty and plan.fault == "model" else 5)
    device.get_default_device().SetRandSeed(rank)
    net.set_optimizer(optimizer)
    x = tensor.from_numpy(np.random.default_rng(rank).standard_normal((4, 6), np.float32))
    y = tensor.from_numpy(np.arange(4, dtype=np.int32) % 3)
    net.compile([x], is_train=True)
    for step in range(STEPS):
        if step == STEPS - 1 and plan.place == "between":
            at_fault(optimizer.communicator, faulty, plan)
        net(x, y)
    if plan.place == "inside":
        reduce_large_arrays(optimizer.communicator, faulty, plan)
    print(f"rank {rank} finished", flush=True)


def at_fault(communicator, faulty: bool, plan: Plan) -> None:
    if plan.fault in MISTAKES:
        if faulty:
            say()
        MISTAKES[plan.fault](communicator, faulty)
    elif faulty:
        go_wrong(plan, communicator)


def reduce_large_arrays(communicator, faulty: bool, plan: Plan) -> None:
    """Collectives without pause, on wire memory and on an ordinary array, while a thread of one rank does harm."""
    wire, ordinary = communicator.empty(LARGE), np.zeros(LARGE, np.float32)
    wire[...] = 0
    small = np.zeros(3)
    communicator.barrier()
    if plan.fault in (*MISTAKES, "raise", "sys.exit", "memory"):
        works = [communicator.all_reduce(wire, label="wire"), communicator.all_reduce(ordinary, label="ordinary")]
        at_fault(communicator, faulty, plan)
        for work in works:
            work.wait()
        communicator.barrier()
        return
    if faulty:
        threading.Timer(plan.delay, go_wrong, (plan,)).start()
    end = time.monotonic() + (plan.delay + 3.0 if plan.fault == "pause" else 60.0)
    while True:
        left = np.array([end - time.monotonic()])
        works = [communicator.all_reduce(array) for array in (wire, ordinary, small)]
        works.append(communicator.all_reduce(left, "min"))
        for work in works:  # a rank that left without would make others fail
            work.wait()
        if left[0] < 0:
            return


# -- faults ----------------------------------------------------------------------------------------------------------
def go_wrong(plan: Plan, communicator=None) -> None:
    say()
    FAULTS[plan.fault](communicator)


def say() -> None:
    """The moment of the fault and the process, for `tests.faults.cases`. Appears at once, and whole."""
    told = Path(os.environ["DISTOPT_TEST_FAULT"])
    new = told.with_suffix(".new")
    new.write_text(f"{time.monotonic()} {os.getpid()}")
    new.rename(told)


def fail(_) -> None:
    raise ValueError("the cause")


def limit_files(communicator) -> None:
    """As if the file system behind shared memory were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    communicator.empty(1 << 20)


def limit_memory(communicator) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
    communicator.empty(16 << 20)


def leave_unseen(_) -> None:
    """As if mpiexec missed that this process has ended."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(3)


def wait_for_harm(_) -> None:
    """The harm comes from outside: `tests.faults.cases` has read of it. Returns a second after the parent's end.

    A rank at "start" has not called distopt yet, which ends with its parent only from then on. Others are ended then,
    but might finish first if they went on at once.
    """
    parent, deadline = os.getppid(), time.monotonic() + 60.0
    if threading.current_thread() is threading.main_thread():
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)


FAULTS: dict[str, Callable] = {
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
    "sys.exit": lambda _: sys.exit(3),
    "os._exit": lambda _: os._exit(3),
    "unseen": leave_unseen,
    "parent": wait_for_harm,
    "interrupt": wait_for_harm,
}


def other_count(communicator, faulty: bool) -> None:
    communicator.all_reduce(np.zeros(50_001 if faulty else 50_000, np.float32), label="sums").wait()


def other_type(communicator, faulty: bool) -> None:
    communicator.all_reduce(np.zeros(50_000, np.int32 if faulty else np.float32), label="sums").wait()


def other_operation(communicator, faulty: bool) -> None:
    if faulty:
        communicator.broadcast(np.zeros(50_000, np.float32), label="sums").wait()
    else:
        communicator.all_reduce(np.zeros(50_000, np.float32), label="sums").wait()


def skip_one(communicator, faulty: bool) -> None:
    """One of three reductions that differ in nothing but their labels."""
    for label in ("first", "second", "third"):
        if not (faulty and label == "second"):
            communicator.all_reduce(np.zeros(50_000, np.float32), label=label).wait()


def allocate(communicator, faulty: bool, limit: Callable) -> None:
    if faulty:
        limit(communicator)
    communicator.empty((1 if limit is limit_files else 16) << 20)


MISTAKES: dict[str, Callable] = {
    "count": other_count,
    "type": other_type,
    "operation": other_operation,
    "skip": skip_one,
    "shm full": functools.partial(allocate, limit=limit_files),
    "memory": functools.partial(allocate, limit=limit_memory),
}


# -- starts ----------------------------------------------------------------------------------------------------------
def start_processes(plan: Plan) -> None:
    ticket = singa_wrap.NcclIdHolder()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=train, args=(rank, plan.world_size, ticket, plan)) for rank in range(plan.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes", *[process.exitcode for process in processes], flush=True)
    sys.exit(max(abs(process.exitcode) for process in processes))


def main() -> None:
    start, fault, place, world_size, rank, delay = sys.argv[1:]
    plan = Plan(start, fault, place, int(world_size), int(rank), float(delay))
    if plan.start == "main":
        launch.main(train, plan.world_size, (singa_wrap.NcclIdHolder(), plan))
    elif plan.start == "raw":
        start_processes(plan)
    else:
        info = launch.launcher()
        assert info is not None
        if plan.place == "launch" and info.rank == plan.rank:
            go_wrong(plan)
        launch.main(train, args=(info.rank, info.size, None, plan))


if __name__ == "__main__":
    main()
