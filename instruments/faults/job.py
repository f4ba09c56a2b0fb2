"""A small training run in which one rank goes wrong as its arguments say. Run by `instruments.faults.trials`.

python -m instruments.faults.job START KIND PLACE WORLD_SIZE RANK DELAY FOLDER

START: main (`distopt.launch.main`), raw (`multiprocessing.Process`, as in SINGA's documentation), rank (a launcher has
started this process as a rank). RANK goes wrong, at PLACE: launch (before MPI_Init), start (before the ranks have met),
inside (a collective) or between (two steps). DELAY: seconds into the collective. FOLDER: for the ranks' own
reports.
"""

import multiprocessing
import os
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distopt import device, launch, layer, model, opt, singa_wrap, tensor

from .kinds import BETWEEN, GOES_ON, INSIDE, KINDS, LAUNCH, MAY_GO_ON, START, LeftError

STEPS = 3
LARGE = 4_000_003  # elements: a collective that other threads can hit


class Plan(NamedTuple):
    start: str
    kind: str
    place: str
    world_size: int
    rank: int
    delay: float
    folder: str

    def tell(self, name: str, text: str) -> None:
        """Write a file that appears at once, and whole."""
        path = Path(self.folder, name)
        new = path.with_suffix(".new")
        new.write_text(text)
        new.rename(path)


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layer.Linear(5, activation="RELU")
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


class Rank:
    """One rank; what `instruments.faults.kinds` needs to go wrong."""

    optimizer: opt.DistOpt

    def __init__(self, rank: int, plan: Plan) -> None:
        self.plan = plan
        self.number = rank
        self.kind = KINDS.get(plan.kind)
        self.is_faulty = rank == plan.rank
        self.x = tensor.from_numpy(np.random.default_rng(rank).standard_normal((4, 6), np.float32))
        self.y = tensor.from_numpy(np.arange(4, dtype=np.int32) % 3)
        plan.tell(f"rank{rank}", f"{os.getpid()} {socket.gethostname()}")

    @property
    def communicator(self):
        return self.optimizer.communicator

    def may_go_on(self) -> bool:
        """Whether `instruments.faults.trials` ends the stall of an unsupervised rank."""
        return Path(self.plan.folder, "go on").exists()

    def arrive(self, place: str) -> None:
        """The fault comes, if this is its place."""
        if self.kind is None or place != self.plan.place:
            return
        if self.is_faulty:
            self.plan.tell("fault", f"{time.monotonic()} {os.getpid()}")
        if self.kind.together:
            self.kind.harm(self, self.is_faulty)
        elif self.is_faulty:
            self.kind.harm(self)


def train(rank: int, world_size: int, ticket, plan: Plan) -> None:
    try:
        train_to_the_end(Rank(rank, plan), world_size, ticket, plan)
    except LeftError:
        return


def train_to_the_end(rank: Rank, world_size: int, ticket, plan: Plan) -> None:
    rank.arrive(START)
    rank.optimizer = opt.DistOpt(
        opt.SGD(lr=0.1),
        ticket,
        rank.number if ticket else None,
        world_size if ticket else None,
    )
    assert (rank.optimizer.global_rank, rank.optimizer.world_size) == (rank.number, world_size)
    device.get_default_device().SetRandSeed(rank.number)
    net = Net()
    net.set_optimizer(rank.optimizer)
    net.compile([rank.x], is_train=True)
    for step in range(STEPS):
        if step == STEPS - 1:
            rank.arrive(BETWEEN)
        net(rank.x, rank.y)
    if plan.place == INSIDE:
        reduce_large_arrays(rank, plan)
    plan.tell(f"finished{rank.number}", "")


def reduce_large_arrays(rank: Rank, plan: Plan) -> None:
    """Collectives without pause, on wire memory and on an ordinary array, while a thread of one rank does harm."""
    communicator, kind = rank.communicator, rank.kind
    wire, ordinary = communicator.empty(LARGE), np.zeros(LARGE, np.float32)
    wire[...] = 0
    small = np.zeros(3)
    communicator.barrier()
    if kind is None or kind.inline:
        works = [communicator.all_reduce(wire, label="wire"), communicator.all_reduce(ordinary, label="ordinary")]
        rank.arrive(INSIDE)
        for work in works:
            work.wait()
        communicator.barrier()
        return
    if rank.is_faulty:
        threading.Timer(plan.delay, rank.arrive, (INSIDE,)).start()
    end = time.monotonic() + {GOES_ON: plan.delay + 3.0, MAY_GO_ON: 12.0}.get(kind.end, 60.0)
    while True:
        left = np.array([end - time.monotonic()])
        works = [communicator.all_reduce(array) for array in (wire, ordinary, small)]
        works.append(communicator.all_reduce(left, "min"))
        for work in works:  # a rank that left without would make others fail
            work.wait()
        if left[0] < 0:
            return


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
    sys.exit(max(abs(process.exitcode) for process in processes))


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
    start, kind, place, world_size, rank, delay, folder = sys.argv[1:]
    plan = Plan(start, kind, place, int(world_size), int(rank), float(delay), folder)
    if plan.start == "main":
        launch.main(train, plan.world_size, (singa_wrap.NcclIdHolder(), plan))
    elif plan.start == "raw":
        start_processes(plan)
    else:
        info = launch.launcher()
        assert info is not None
        if plan.place == LAUNCH and info.rank == plan.rank:
            Rank(info.rank, plan).arrive(LAUNCH)
        launch.main(train, args=(info.rank, info.size, None, plan))


if __name__ == "__main__":
    main()
