"""A rank that trains a small net until a file appears, for `distopt run --watch`; one rank may be slow, wait or print.

watch_script.py FRONT FILE [slow RANK | late RANK | prints | save]
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

SLOW_SECONDS = 0.02
MOST_SECONDS = float(os.environ.get("WATCH_SECONDS", "500"))


def steps_of_nn():
    from distopt import opt
    from tests.ranks.small_net import SMALL, batch, build

    optimizer = opt.DistOpt(opt.SGD(lr=0.0), bucket_elements=SMALL)
    net = build(optimizer)
    rank = optimizer.global_rank

    def step(number: int) -> None:
        net(*batch(number % 7, rank), optimizer)

    return rank, step, lambda array: optimizer.communicator.all_reduce(array).wait()


def steps_of_torch():
    import torch
    import torch.distributed as dist

    import distopt.torch  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("distopt")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 20))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        net(torch.full((8, 20), float(number))).square().mean().backward()
        optimizer.step()

    return dist.get_rank(), step, lambda array: dist.all_reduce(torch.from_numpy(array))


def main(front: str, file: Path, habit: str = "", which: int = -1) -> None:
    rank, step, all_reduce = steps_of_nn() if front == "nn" else steps_of_torch()
    began = time.monotonic()
    for number in range(1_000_000):
        if habit == "slow" and rank == which:
            time.sleep(SLOW_SECONDS)
        step(number)
        if habit == "prints" and number % 20 == rank:
            sys.stdout.write(f"rank {rank} has done {number}\n")
            sys.stderr.write(f"\r{rank}: {number} of many" + " ." * 60 + "\r")
        if habit == "late" and number == 10:
            while rank == which and not file.exists():
                time.sleep(0.01)
        ends = np.array([file.exists() or time.monotonic() - began > MOST_SECONDS], np.float32)
        if number % 10 == 0:
            all_reduce(ends)
            if ends[0]:
                break
    print(f"rank {rank} has ended well")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:5]))
