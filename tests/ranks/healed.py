"""A job that is to be healed; prints each tenth step, and a digest of its parameters at the end.

distopt run --heal --nproc-per-node 2 -m tests.ranks.healed --steps 100
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np

import distopt
from distopt import autograd, device, layer, model, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.errors import UsageError


class Network(model.Model):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = layer.Conv2d(3, 3), layer.BatchNorm2d(), layer.Linear(4)
        self.dropout = layer.Dropout(dropout)

    def forward(self, x):
        return self.last(self.dropout(autograd.flatten(autograd.relu(self.norm(self.first(x))))))

    def train_one_batch(self, x, y):
        loss = autograd.softmax_cross_entropy(self.forward(x), y)
        self.optimizer(loss)
        return loss


def digest_of(*things) -> str:
    """Of the states of a network and the like."""
    digest = hashlib.blake2b(digest_size=8)
    for thing in things:
        for name, states in sorted(thing.get_states().items()):
            digest.update(name.encode() + np.asarray(tensor.to_numpy(states)).tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds after each step (0.005)")
    parser.add_argument("--until", type=Path, default="", help="a file: when it exists, there are no pauses any more")
    parser.add_argument("--folder")
    parser.add_argument("--raise-at", type=int, help="after so many steps, on rank 1")
    args = parser.parse_args()
    world = distopt.init()
    numbers = np.random.default_rng(17 + world.rank)
    device.get_default_device().SetRandSeed(3)
    network = Network()
    network.set_optimizer(opt.DistOpt(opt.SGD(0.05, momentum=0.9)))
    x, y = tensor.from_numpy(np.ones((8, 1, 8, 8), np.float32)), tensor.from_numpy(np.zeros(8, np.int32))
    network.compile([x], is_train=True)
    checkpoint = Checkpoint(args.folder, every=40, model=network, optimizer=network.optimizer, numbers=numbers)
    checkpoint.resume(reset=True)
    print(f"rank {world.rank} is {os.getpid()} after {checkpoint.steps}", flush=True)
    while checkpoint.steps < args.steps:
        x.copy_from_numpy(numbers.standard_normal((8, 1, 8, 8), np.float32))
        y.copy_from_numpy(numbers.integers(0, 4, 8).astype(np.int32))
        network(x, y)
        time.sleep(0 if args.until.is_file() else args.pause)
        if world.rank == 1 and checkpoint.steps == args.raise_at:
            raise ZeroDivisionError("so it is")
        checkpoint.step()
        if checkpoint.steps % 10 == 0 and world.rank == 0:
            print(f"step {checkpoint.steps}", flush=True)
    checkpoint.close()
    print(f"ends with {digest_of(network)} {numbers.integers(1 << 30)} of rank {world.rank}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
