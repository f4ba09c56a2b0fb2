"""A rank that trains a small net for some steps, by either front, or calls collectives in ways that fail."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

STEPS = 12
SLOW_SECONDS = 0.2  # far from what another program on the machine can make a rank wait


def train_nn(slow: int, front: str) -> None:
    import distopt
    from distopt import opt
    from tests.ranks.small_net import SMALL, batch, build, step_of

    optimizer = opt.DistOpt(opt.SGD(lr=0.05), codec="fp16", bucket_elements=SMALL)
    net, update = build(optimizer), step_of(optimizer, "partialUpdate") if front == "partial" else optimizer
    for step in range(STEPS):
        if optimizer.global_rank == slow:
            time.sleep(SLOW_SECONDS)
        net(*batch(step, optimizer.global_rank), update)
    assert distopt.init().world_size == optimizer.world_size


def train_torch(slow: int, front: str) -> None:
    import torch
    import torch.distributed as dist

    import distopt.torch

    torch.set_num_threads(1)
    dist.init_process_group("distopt")
    rank = dist.get_rank()
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
    for step in range(STEPS):
        if rank == slow:
            time.sleep(SLOW_SECONDS)
        optimizer.zero_grad()
        net(torch.full((4, 20), float(step - rank))).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


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
        elif how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise ZeroDivisionError("the cause")
        elif how == "SIGQUIT":
            os.kill(os.getpid(), signal.SIGQUIT)
        elif how == "SIGQUIT to the agent":
            os.kill(os.getppid(), signal.SIGQUIT)
            while len([*Path(os.environ["DISTOPT_FLIGHT_FOLDER"]).glob("stacks-*")]) < world.world_size:
                time.sleep(0.01)
    world.all_reduce(values)
    print(f"rank {rank} has ended well")


if __name__ == "__main__":
    front, argument = sys.argv[1:]
    if argument == "caught":
        try:
            fail("operation")
        except RuntimeError as error:
            print(f"has caught {type(error).__name__}")
    elif front == "fail":
        fail(argument)
    elif front in ("nn", "partial"):
        train_nn(int(argument), front)
    else:
        train_torch(int(argument), front)
