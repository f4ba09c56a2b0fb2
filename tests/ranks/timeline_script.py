"""A rank that trains a small net by one of the fronts, or calls collectives in ways that fail.

timeline_script.py FRONT SLOW: for STEPS steps, in which rank SLOW takes its time
timeline_script.py FRONT FILE [slow RANK | late RANK | prints]: until the file appears, for `distopt run --watch`
timeline_script.py fail HOW
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

STEPS = 12
SLOW_SECONDS = 0.2  # far from what another program on the machine can make a rank wait
MOST_SECONDS = float(os.environ.get("WATCH_SECONDS", "500"))


def by_nn(front: str):
    """The rank, its step of a number, a sum over the ranks, and the end."""
    from distopt import opt
    from tests.ranks.small_net import SMALL, batch, build, step_of

    optimizer = opt.DistOpt(opt.SGD(lr=0.05), codec="fp16", bucket_elements=SMALL)
    net, update = build(optimizer), step_of(optimizer, "partialUpdate") if front == "partial" else optimizer

    def step(number: int) -> None:
        net(*batch(number % 7, optimizer.global_rank), update)

    return optimizer.global_rank, step, lambda array: optimizer.communicator.all_reduce(array).wait(), lambda: None


def by_torch(front: str):
    """The same with PyTorch."""
    import torch
    import torch.distributed as dist

    import distopt.torch

    torch.set_num_threads(1)
    dist.init_process_group("distopt")
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    if front == "distopt":
        optimizer = distopt.torch.DistOpt(optimizer, net.named_parameters(), codec="fp16", bucket_elements=500)
    elif front == "diloco":
        outer = torch.optim.SGD(net.parameters(), lr=0.7)
        distopt.torch.DiLoCo(net, optimizer, outer, sync_every=1, bucket_elements=500)
    else:
        net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
        if front == "hook":
            net.register_comm_hook(*distopt.torch.hook(net, "fp16", bucket_elements=500))

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(torch.full((8, 20), float(number % 7 - dist.get_rank()))).square().mean().backward()
        optimizer.step()

    return dist.get_rank(), step, lambda array: dist.all_reduce(torch.from_numpy(array)), dist.destroy_process_group


def main(front: str, argument: str, habit: str = "", which: str = "-1") -> None:
    rank, step, all_reduce, close = (by_nn if front in ("nn", "partial") else by_torch)(front)
    if argument.lstrip("-").isdigit():
        for number in range(STEPS):
            time.sleep(SLOW_SECONDS if rank == int(argument) else 0.0)
            step(number)
    else:
        watched(rank, step, all_reduce, Path(argument), habit if rank == int(which) or habit == "prints" else "")
    close()


def watched(rank: int, step, all_reduce, file: Path, habit: str) -> None:
    began = time.monotonic()
    for number in range(1_000_000):
        time.sleep(0.02 if habit == "slow" else 0.002)  # leaves the cores to others
        step(number)
        if habit == "prints" and number % 20 == rank:
            sys.stdout.write(f"rank {rank} has done {number}\n")
            sys.stderr.write(f"\r{rank}: {number} of many" + " ." * 60 + "\r")
        while habit == "late" and number == 10 and not file.exists():
            time.sleep(0.01)
        ends = np.array([file.exists() or time.monotonic() - began > MOST_SECONDS], np.float32)
        if number % 10 == 0:
            all_reduce(ends)
            if ends[0]:
                break
    print(f"rank {rank} has ended well")


def fail(how: str) -> None:
    if how == "SIGQUIT at the end":
        atexit.register(os.kill, os.getpid(), signal.SIGQUIT)  # after what distopt registers later
    import distopt

    world = distopt.init()
    rank, values = world.rank, np.arange(5, dtype=np.float32)
    for _ in range(300):  # more than there are records
        world.all_reduce(values)
    if rank == 1:
        if how == "operation":
            world.broadcast(values)
        elif how == "count":
            values = np.arange(7, dtype=np.float32)
        elif how == "type":
            values = values.astype(np.float64)
        elif how == "stall":
            time.sleep(1000)
        elif how == "raise":
            raise ZeroDivisionError("the cause")
        elif how in ("SIGKILL", "SIGQUIT"):
            os.kill(os.getpid(), signal.Signals[how])
        elif how == "SIGQUIT to the agent":
            os.kill(os.getppid(), signal.SIGQUIT)
            while len([*Path(os.environ["DISTOPT_FLIGHT_FOLDER"]).glob("stacks-*")]) < world.world_size:
                time.sleep(0.01)
    world.all_reduce(values)
    print(f"rank {rank} has ended well")


if __name__ == "__main__":
    if sys.argv[2] == "caught":
        try:
            fail("operation")
        except RuntimeError as error:
            print(f"has caught {type(error).__name__}")
    elif sys.argv[1] == "fail":
        fail(sys.argv[2])
    else:
        main(*sys.argv[1:])
