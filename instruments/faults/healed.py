"""A job that is to be healed, in shards, so that ranks and hosts may come and go; prints each step, and a digest last.

distopt run --heal --nproc-per-node 1:2 -m instruments.faults.healed --steps 100
"""

import argparse
import hashlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import distopt
from distopt import autograd, device, layer, model, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.data import ShardedSampler

SHARDS = 8


class Network(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = layer.Conv2d(3, 3), layer.BatchNorm2d(), layer.Linear(4)
        self.dropout = layer.Dropout(0.2)

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


def batches(sampler: ShardedSampler, first: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each with the number of its epoch."""
    for epoch in itertools.count(first):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            yield epoch, chosen


def options(pause: float = 0.005) -> argparse.ArgumentParser:
    """Those of all jobs that print as this one does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=pause, help=f"seconds after each step ({pause})")
    parser.add_argument("--until", type=Path, default="", help="a file: when it exists, there are no pauses any more")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--samples", type=int, default=200, help="of an epoch")
    parser.add_argument("--killed-at", type=int, help="after so many steps, rank 1 of the first attempt is killed")
    parser.add_argument("--raise-at", type=int, help="after so many steps, on rank 1")
    return parser


def come(checkpoint: Any, rank: int, world_size: int) -> Any:
    """Resume, and say so: what was resumed."""
    resumed = checkpoint.resume()
    came = f"resumed from {resumed.world_size}" if resumed else "anew"
    print(f"rank {rank} is {os.getpid()} after {checkpoint.steps}, one of {world_size}, {came}", flush=True)
    return resumed


def begin(args: argparse.Namespace, checkpoint: Any, rank: int, resumed: Any) -> None:
    """A step begins."""
    if args.killed_at == checkpoint.steps and rank == 1 and resumed is None:
        os.kill(os.getpid(), signal.SIGKILL)


def end(args: argparse.Namespace, checkpoint: Any, rank: int, epoch: int) -> None:
    """A step is done."""
    time.sleep(0 if args.until.is_file() else args.pause)
    if rank == 1 and checkpoint.steps == args.raise_at:
        raise ZeroDivisionError("so it is")
    checkpoint.step(epoch)
    if rank == 0:
        print(f"step {checkpoint.steps}", flush=True)


def main() -> None:
    parser = options()
    parser.add_argument("--lost", help="LOCAL_RANK:FIRST:LAST: that rank of 2 or more is killed in these attempts")
    parser.add_argument("--no-shards", action="store_true", help="for as many ranks at the end as at the start")
    args = parser.parse_args()
    if args.lost and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        local_rank, first, last = args.lost.split(":")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["LOCAL_RANK"] == local_rank and int(first) <= attempt <= int(last):
            os.kill(os.getpid(), signal.SIGKILL)
    world = distopt.init()
    device.get_default_device().SetRandSeed(3)
    network = Network()
    shards = None if args.no_shards else SHARDS
    network.set_optimizer(opt.DistOpt(opt.SGD(0.05, momentum=0.9), shards=shards, seed=5))
    numbers = np.random.default_rng(17)
    count = args.samples
    x, y = numbers.standard_normal((count, 1, 8, 8), np.float32), numbers.integers(0, 4, count).astype(np.int32)
    sampler = ShardedSampler(len(x), world.world_size, world.rank, 2, shards=shards)
    network.compile([tensor.from_numpy(x[:2])], is_train=True)
    parts = {"model": network, "optimizer": network.optimizer, "sampler": sampler}
    checkpoint = Checkpoint(args.folder, every=args.every, keep=1000, **parts)
    resumed = come(checkpoint, world.rank, world.world_size)
    data = batches(sampler, checkpoint.epoch)
    while checkpoint.steps < args.steps:
        epoch, chosen = next(data)
        begin(args, checkpoint, world.rank, resumed)
        for part in [chosen] if shards is None else network.optimizer.shards(chosen):
            network(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]))
        end(args, checkpoint, world.rank, epoch)
    checkpoint.close()
    print(f"ends with {digest_of(network, network.optimizer)}", flush=True)


if __name__ == "__main__":
    main()
