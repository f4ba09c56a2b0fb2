"""The cost of checkpoints: 100 steps of the example with a checkpoint, and 100 without, in turn.

    python -m benchmarks checkpoint --np 2 --pairs 60 --dist-option fp32
    python -m benchmarks checkpoint --np 2 --pytorch

The checkpoint is saved first, and has been written at the end. Needs the real MNIST, or says that it is generated.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distopt import launch, opt
from distopt.checkpoint import Checkpoint, checkpoint
from distopt.cli.values import at_least
from distopt.data import ShardedSampler
from distopt.device import Staging

from .models import sgd, train_cnn

BATCH = 64


def measure(rank: int, world_size: int, args: argparse.Namespace) -> None:
    saver, step, wait_for_all = (pytorch_job if args.pytorch else job)(rank, world_size, args)
    saver.resume(reset=True)
    saves, writes = timed(saver, "save"), timed(checkpoint, "write_rank")

    def steps(saving: bool) -> float:
        wait_for_all()
        start = time.perf_counter()
        if saving:
            saver.save()
        for _ in range(args.every):
            step()
            saver.step()
        saver._wait()
        wait_for_all()
        return time.perf_counter() - start

    for _ in range(4):  # until there are checkpoints to remove
        steps(True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(args.pairs):
        for saving in (True, False) if pair % 2 else (False, True):
            seconds[saving].append(steps(saving))
    saver.close()
    if rank == 0:
        report(args, world_size, seconds, saves, writes)
    wait_for_all()


def job(rank: int, world_size: int, args: argparse.Namespace) -> tuple[Checkpoint, Callable, Callable]:
    """A checkpoint, a function that takes a step, and a barrier."""
    optimizer = opt.DistOpt(sgd())
    data = train_cnn.mnist.load(args.data_dir, rank=rank, exchange=optimizer.communicator.all_gather_bytes)
    sampler = ShardedSampler(len(data.train_x), world_size, rank, BATCH)
    noise = np.random.default_rng(rank)
    staging = Staging(optimizer.device, ((BATCH, *data.train_x.shape[1:]), np.float32), ((BATCH,), np.int64))
    cnn = train_cnn.CNN()
    cnn.set_optimizer(optimizer)
    cnn.compile(staging.send()[:1], is_train=True)
    stream = itertools.chain.from_iterable(itertools.repeat(sampler))

    def step() -> None:
        chosen = next(stream)
        images, labels = staging.fill()
        train_cnn.random_shift(data.train_x[chosen], images, noise, 2)
        labels[:] = data.train_y[chosen]
        x, y = staging.send()
        cnn(x, y, args.dist_option, 0.05)

    saver = Checkpoint(args.folder, model=cnn, optimizer=optimizer, sampler=sampler, noise=noise)
    return saver, step, optimizer.communicator.barrier


def pytorch_job(rank: int, world_size: int, args: argparse.Namespace) -> tuple[Checkpoint, Callable, Callable]:
    """The same of PyTorch's DDP over distopt, with AdamW, which has twice the states."""
    import torch
    import torch.distributed as dist

    import distopt.torch

    from .peers.ranks.networks_torch import build

    torch.set_num_threads(1)
    store = dist.FileStore(f"{args.folder}/store", world_size)
    dist.init_process_group("distopt", store=store, rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(build("cnn"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return distopt.torch.Checkpoint(args.folder, model=model, optimizer=optimizer), step, dist.barrier


def timed(owner, name: str) -> list[tuple[float, float]]:
    """Seconds of every call of a function from now on: those that pass, and those of the processor."""
    function, found = getattr(owner, name), []

    def call(*args, **options):
        start = time.perf_counter(), time.thread_time()
        function(*args, **options)
        found.append((time.perf_counter() - start[0], time.thread_time() - start[1]))

    setattr(owner, name, call)
    return found


def report(args: argparse.Namespace, world_size: int, seconds, saves, writes) -> None:
    with_, without = (np.array(seconds[saving]) for saving in (True, False))
    change = with_ / without - 1
    size = sum(file.stat().st_size for file in max(Path(args.folder).glob("step-*")).iterdir())
    low, high = np.percentile(change, [25, 75])
    print(
        f"{'PyTorch' if args.pytorch else args.dist_option}, {world_size} ranks, a checkpoint of {size / 1e6:.2f} MB every {args.every} steps, "
        f"{args.pairs} pairs\n"
        f"{args.every} steps: {np.median(without):.3f} s without, {np.median(with_):.3f} s with; "
        f"median of the pairs {np.median(change):+.2%} (quartiles {low:+.2%} ... {high:+.2%})\n"
        f"rank 0: {described('save', saves)}; {described('the thread', writes)}"
    )


def described(what: str, calls: list[tuple[float, float]]) -> str:
    passed, processor = np.median(calls, axis=0) * 1e3
    return f"{what} takes {passed:.2f} ms, {processor:.2f} ms of the processor"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=at_least(1), default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--pairs", type=at_least(1), default=60, metavar="N", help="(60)")
    parser.add_argument("--every", type=at_least(1), default=100, metavar="STEPS", help="(100)")
    parser.add_argument("--dist-option", default="fp32", choices=opt.DIST_OPTIONS, help="what is sent (fp32)")
    parser.add_argument("--pytorch", action="store_true", help="DDP over distopt, without data")
    parser.add_argument("--data-dir", help="folder with MNIST's four files")
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or temporary
        launch.main(measure, args.np, (args,))
