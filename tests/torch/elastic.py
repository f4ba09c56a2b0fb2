"""A job of PyTorch in shards, whose ranks and hosts may come and go; prints as `tests.ranks.healed` does.

distopt run --heal --nproc-per-node 1:2 -m tests.torch.elastic ddp --steps 100
"""

import argparse
import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distopt.torch

from .resumed import digest

SHARDS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("by", choices=["dist-opt", "ddp", "plain"], help="plain: DDP without shards")
    parser.add_argument("--backend", default="distopt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds after each step (0.005)")
    parser.add_argument("--until", type=Path, default="", help="a file: when it exists, there are no pauses any more")
    parser.add_argument("--samples", type=int, default=200, help="of an epoch")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--killed-at", type=int, help="after so many steps, rank 1 of the first attempt is killed")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3000), nn.Dropout(0.2),
        nn.Linear(3000, 4),
    )  # fmt: skip
    sgd = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    parts = {"model": net, "optimizer": sgd}
    shards = None if args.by == "plain" else SHARDS
    if args.by == "plain":
        parts["model"] = model = DistributedDataParallel(net)
        parts["schedule"] = schedule = torch.optim.lr_scheduler.StepLR(sgd, 7, 0.97)
        step = sgd
    elif args.by == "ddp":
        parts["model"] = model = DistributedDataParallel(net)
        parts["hook"], function = distopt.torch.hook(model, shards=SHARDS, seed=5)
        model.register_comm_hook(parts["hook"], function)
        cut, step = parts["hook"], sgd
    else:
        model = net
        cut = step = parts["optimizer"] = distopt.torch.DistOpt(
            sgd, net.named_parameters(), shards=SHARDS, seed=5, model=net
        )
    torch.manual_seed(100 + rank)
    images = torch.randn(args.samples, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    labels = images.flatten(1)[:, :4].argmax(1)
    sampler = distopt.torch.ResumableSampler(len(images), 2, seed=2, shards=shards)
    checkpoint = distopt.torch.Checkpoint(args.folder, every=args.every, sampler=sampler, **parts)
    resumed = checkpoint.resume()
    came = f"resumed from {resumed.world_size}" if resumed else "anew"
    print(f"rank {rank} is {os.getpid()} after {checkpoint.steps}, one of {size}, {came}", flush=True)
    for epoch in itertools.count(checkpoint.epoch):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            if args.killed_at == checkpoint.steps and rank == 1 and resumed is None:
                os.kill(os.getpid(), signal.SIGKILL)
            for part in [chosen] if shards is None else cut.shards(chosen):
                nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            step.step()
            if shards is None:
                sgd.zero_grad()
                schedule.step()
            time.sleep(0 if args.until.is_file() else args.pause)
            checkpoint.step(epoch)
            if rank == 0:
                print(f"step {checkpoint.steps}", flush=True)
            if checkpoint.steps >= args.steps:
                break
        if checkpoint.steps >= args.steps:
            break
    checkpoint.close()
    print(f"ends with {digest(net, sgd)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
