"""A rank of a small training on two hosts, into which `tests.faults.hosts` brings faults from outside."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

from distopt import launch, layer, model, opt, tensor

FEATURES, CLASSES, BATCH = 64, 5, 16
READY_STEP = 3
LIMIT_SECONDS = 100.0


class Net(model.Model):
    """Large enough that gradients travel through shared memory and MPI."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = layer.Linear(301, activation="RELU")
        self.linear2 = layer.Linear(CLASSES)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.linear1(x))

    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def fail(*_) -> None:
    raise ValueError("the cause")


def train(told: str) -> None:
    sgd = opt.DistOpt(opt.SGD(lr=0.01))
    # After MPI_Init, which takes SIGUSR1 for itself.
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))
    rank = sgd.global_rank
    rng = np.random.default_rng(rank)
    x = tensor.from_numpy(rng.random((BATCH, FEATURES), np.float32))
    y = tensor.from_numpy(rng.integers(0, CLASSES, BATCH, np.int32))
    net = Net()
    net.set_optimizer(sgd)
    net.compile([x], is_train=True)
    until = time.monotonic() + LIMIT_SECONDS
    step = 0
    while time.monotonic() < until:
        net.train_one_batch(x, y)
        step += 1
        if step == READY_STEP:
            ready = Path(told, f"{rank}.new")
            ready.write_text(f"{os.getpid()} {socket.gethostname()}")
            ready.rename(ready.with_suffix(""))
        if rank == 1:
            time.sleep(0.005)  # the others wait for it most of the time, as in a real job for the slowest


if __name__ == "__main__":
    launch.main(train, args=(sys.argv[1],))
