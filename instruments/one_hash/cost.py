"""The cost of shards: a step in shards, one that accumulates the same micro-batches, and a plain one, in turn.

    distopt run --nproc-per-node 2 -m instruments.one_hash.cost nn cnn

prints the time of each, and its ratio to accumulation: the median over rounds of the ratio in a round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter, process_time

import numpy as np

from distopt import launch, opt, tensor

from . import nets

SHARDS = 8


def steps_of_nn(name: str, batch: int) -> dict[str, Callable[[], None]]:
    """A step of each kind, of the package's own front."""
    made = {}
    job = launch.join()
    x = np.random.default_rng(job.topology.rank).standard_normal((batch, 3, nets.SIDES[name], nets.SIDES[name]))
    x, y = x.astype(np.float32), np.zeros(batch, np.int32)
    count = SHARDS // job.topology.world_size
    parts = np.array_split(np.arange(batch), count)
    for kind in ("accumulated", "in shards", "plain"):
        dist = opt.DistOpt(opt.SGD(lr=1e-4, momentum=0.9), shards=SHARDS if kind == "in shards" else None)
        net = nets.net(name)
        net.set_optimizer(dist)
        net.compile([tensor.from_numpy(x[:2])], is_train=True)

        def call(part, net=net) -> None:
            net(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]))

        def in_shards(dist=dist, call=call) -> None:
            for part in dist.shards(np.arange(batch)):
                call(part)

        def accumulated(dist=dist, call=call) -> None:
            for place, part in enumerate(parts):
                with dist.no_sync() if place < count - 1 else nullcontext():
                    call(part)

        made[kind] = {"in shards": in_shards, "accumulated": accumulated, "plain": lambda call=call: call(slice(None))}[
            kind
        ]
    return made


def steps_of_torch(name: str, batch: int) -> dict[str, Callable[[], None]]:
    """A step of each kind, of `distopt.torch.DistOpt`."""
    import torch
    import torch.distributed as dist

    import distopt.torch

    torch.set_num_threads(1)
    dist.init_process_group("distopt")
    made = {}
    x, y = torch.randn(batch, 3, nets.SIDES[name], nets.SIDES[name]), torch.zeros(batch, dtype=torch.long)
    count = SHARDS // dist.get_world_size()
    for kind in ("accumulated", "in shards", "plain"):
        net = nets.torch_net(name)
        sgd, named = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9), net.named_parameters()
        options = {"shards": SHARDS, "model": net} if kind == "in shards" else {}
        dist_opt = distopt.torch.DistOpt(sgd, named, **options)

        def call(x, y, net=net) -> None:
            torch.nn.functional.cross_entropy(net(x), y).backward()

        def in_shards(dist_opt=dist_opt, call=call) -> None:
            for part in dist_opt.shards(x, y):
                call(*part)
            dist_opt.step()

        def accumulated(dist_opt=dist_opt, call=call) -> None:
            dist_opt.zero_grad()
            for place, part in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
                with dist_opt.no_sync() if place < count - 1 else nullcontext():
                    call(*part)
            dist_opt.step()

        def plain(dist_opt=dist_opt, call=call) -> None:
            dist_opt.zero_grad()
            call(x, y)
            dist_opt.step()

        made[kind] = {"in shards": in_shards, "accumulated": accumulated, "plain": plain}[kind]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("front", choices=["nn", "torch"])
    parser.add_argument("net", choices=nets.SIDES)
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    steps = (steps_of_nn if args.front == "nn" else steps_of_torch)(args.net, args.batch)
    wall: dict[str, list[float]] = {kind: [] for kind in steps}
    used: dict[str, list[float]] = {kind: [] for kind in steps}
    for round_ in range(args.rounds + 3):
        for kind, step in steps.items():
            began, before = perf_counter(), process_time()
            step()
            if round_ >= 3:  # the first ones allocate
                wall[kind].append(perf_counter() - began)
                used[kind].append(process_time() - before)
    if launch.join().topology.rank == 0:
        for kind in steps:
            ratios = [
                median(a / b for a, b in zip(times[kind], times["accumulated"], strict=True)) for times in (wall, used)
            ]
            line = f"{kind:12} {min(wall[kind]) * 1e3:8.2f} ms at best, {ratios[0]:.3f} of accumulated in time, "
            sys.stdout.write(f"{line}{ratios[1]:.3f} in processor time\n")


if __name__ == "__main__":
    main()
