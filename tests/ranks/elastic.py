"""A job in shards, whose ranks and hosts may come and go; prints each step, and a digest of its states last.

distopt run --heal --nproc-per-node 1:2 -m tests.ranks.elastic --steps 100
"""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy as np

import distopt
from distopt import device, opt, tensor
from distopt.checkpoint import Checkpoint
from distopt.data import ShardedSampler
from tests.ranks.healed import Network, digest_of

SHARDS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds after each step (0.005)")
    parser.add_argument("--until", type=Path, default="", help="a file: when it exists, there are no pauses any more")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--lost", help="LOCAL_RANK:FIRST:LAST: that rank of 2 or more is killed in these attempts")
    args = parser.parse_args()
    if args.lost and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        local_rank, first, last = args.lost.split(":")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["LOCAL_RANK"] == local_rank and int(first) <= attempt <= int(last):
            os.kill(os.getpid(), signal.SIGKILL)
    world = distopt.init()
    device.get_default_device().SetRandSeed(3)
    network = Network(dropout=0.2)
    network.set_optimizer(opt.DistOpt(opt.SGD(0.05, momentum=0.9), shards=SHARDS, seed=5))
    numbers = np.random.default_rng(17)
    x, y = numbers.standard_normal((200, 1, 8, 8), np.float32), numbers.integers(0, 4, 200).astype(np.int32)
    sampler = ShardedSampler(len(x), world.world_size, world.rank, 2, shards=SHARDS)
    network.compile([tensor.from_numpy(x[:2])], is_train=True)
    parts = {"model": network, "optimizer": network.optimizer, "sampler": sampler}
    checkpoint = Checkpoint(args.folder, every=args.every, keep=1000, **parts)
    resumed = checkpoint.resume()
    came = f"resumed from {resumed.world_size}" if resumed else "anew"
    print(f"rank {world.rank} is {os.getpid()} after {checkpoint.steps}, one of {world.world_size}, {came}", flush=True)
    for epoch in range(checkpoint.epoch, 1_000_000):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            for part in network.optimizer.shards(chosen):
                network(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]))
            time.sleep(0 if args.until.is_file() else args.pause)
            checkpoint.step(epoch)
            if world.rank == 0:
                print(f"step {checkpoint.steps}", flush=True)
            if checkpoint.steps >= args.steps:
                break
        if checkpoint.steps >= args.steps:
            break
    checkpoint.close()
    print(f"ends with {digest_of(network, network.optimizer)}", flush=True)


if __name__ == "__main__":
    main()
