"""MNIST over a slow network: seconds of training to 98.0 % and to 98.5 %, for several ways to send less.

    distopt run --nproc-per-node 2 examples/pytorch/mnist_slow_link.py --way diloco-sparse
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/pytorch/mnist_slow_link.py --way top-k

The clock stands still while the model is tested.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import distopt.torch
from distopt import codecs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data import mnist

GOALS = (0.98, 0.985)
TOP_K = {"ratio": 0.01, "error_feedback": True}
POWER_SGD = {"rank": 2, "error_feedback": True}


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# Makes of a model the function that a step calls for its output, and the optimizer.
Way = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


def by_ddp(add_hook: Callable[[DistributedDataParallel], Any]) -> Way:
    """Train by DDP, with the hook that `add_hook` registers."""

    def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        ddp = DistributedDataParallel(model)
        add_hook(ddp)
        return ddp, sgd(model)

    return prepare


def by_dist_opt(codec: str, **options: Any) -> Way:
    """Train without DDP, by an optimizer that averages gradients through a codec."""

    def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = codecs.create(codec, **options)
        return model, distopt.torch.DistOpt(sgd(model), model.named_parameters(), codec=made)

    return prepare


def by_diloco(sync_every: int = 30, **options: Any) -> Way:
    """Train each rank by SGD alone, and average the changes every `sync_every` steps."""

    def prepare(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        inner = sgd(model)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
        distopt.torch.DiLoCo(model, inner, outer, sync_every=sync_every, **options)
        return model, inner

    return prepare


def our_hook(codec: str, **options: Any) -> Callable[[DistributedDataParallel], Any]:
    return lambda ddp: ddp.register_comm_hook(*distopt.torch.hook(ddp, codec, **options))


def torch_power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


WAYS: dict[str, Way] = {
    "ddp": by_ddp(lambda _: None),
    "ddp-fp16": by_ddp(lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "ddp-power-sgd": by_ddp(torch_power_sgd),
    "hook-fp16": by_ddp(our_hook("fp16")),
    "hook-top-k": by_ddp(our_hook("top-k", **TOP_K)),
    "hook-power-sgd": by_ddp(our_hook("power-sgd", **POWER_SGD)),
    "top-k": by_dist_opt("top-k", **TOP_K),
    "power-sgd": by_dist_opt("power-sgd", **POWER_SGD),
    "diloco": by_diloco(),
    "diloco-half": by_diloco(sync_every=15, codec="fp16"),
    "diloco-sparse": by_diloco(sync_every=15, codec=codecs.create("top-k", ratio=0.1, error_feedback=True)),
}


def batches(
    images: torch.Tensor, labels: torch.Tensor, size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of this rank's share of the data, shuffled anew in each epoch, without end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shuffling = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=shuffling)[rank::world_size]
        for start in range(0, len(images) // world_size - size + 1, size):
            mine = order[start : start + size]
            yield images[mine], labels[mine]


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """On the test images, a share on each rank. With local updates, each rank tests its own model."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    correct = (model(images[rank::world_size]).argmax(1) == labels[rank::world_size]).sum().reshape(1)
    dist.all_reduce(correct)
    return correct.item() / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="diloco-sparse")
    parser.add_argument("--backend", choices=["distopt", "gloo"], default="distopt", help="of the process group")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step (64)")
    parser.add_argument("--test-every", type=int, default=30, metavar="STEPS", help="(30)")
    parser.add_argument("--seed", type=int, default=1, help="of parameters and batches (1)")
    parser.add_argument("--seconds", type=float, default=300.0, help="most seconds of training (300)")
    parser.add_argument("--data", metavar="DIR", help="where MNIST is (default: as examples/data/mnist.py says)")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(args.seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    digits = mnist.load(args.data, rank=dist.get_rank())
    train_x, test_x = ((torch.from_numpy(x) / 255 - 0.1307) / 0.3081 for x in (digits.train_x, digits.test_x))
    train_y, test_y = (torch.from_numpy(y).long() for y in (digits.train_y, digits.test_y))
    model = network()
    forward, optimizer = WAYS[args.way](model)
    goals, seconds, began = [*GOALS], 0.0, time.perf_counter()
    for step, (x, y) in enumerate(batches(train_x, train_y, args.batch_size, args.seed), 1):
        optimizer.zero_grad()
        functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
        if step % args.test_every:
            continue
        # The slowest rank's clock, so that all ranks end at the same step.
        clock = torch.tensor([seconds + time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(clock, dist.ReduceOp.MAX)
        seconds, found = clock.item(), accuracy(model, test_x, test_y)
        while goals and found >= goals[0]:
            goal = goals.pop(0)
            if dist.get_rank() == 0:
                print(f"{args.way}: {goal:.1%} after {seconds:.1f} s, {step} steps", flush=True)
        if not goals or seconds > args.seconds:
            break
        began = time.perf_counter()
    if dist.get_rank() == 0:
        print(f"{args.way}: {found:.2%} at the end, {step / seconds:.1f} steps/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
