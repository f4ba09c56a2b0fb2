"""Ranks of a DDP training of which one fails. Run by test_faults.py, and by hand for many random trials:

    python -m tests.torch.faults 50

In every trial one rank, at a random step, is killed, stalls, or calls another collective or one of another shape. Every
other rank must end within 5 s (a stall: the group's time-out more) with a DistBackendError that names rank and pid.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distopt.torch  # noqa: F401 - registers the backend

KINDS = ("killed", "stalled", "another collective", "another shape")
TIMEOUT_SECONDS = 3.0
LIMIT_SECONDS = 5.0


def rank_main(rank: int, size: int, path: str, kind: str, culprit: int, at: int, out: object) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_SECONDS if kind == "stalled" else 60)
    dist.init_process_group("distopt", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    last = time.monotonic()
    try:
        for step in range(at + 3):
            if rank == culprit and step == at:
                match kind:
                    case "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stalled":
                        time.sleep(600)
                    case "another collective":
                        dist.barrier()
                    case "another shape":
                        dist.all_reduce(torch.ones(17))
            model(torch.randn(8, 50)).square().mean().backward()
            last = time.monotonic()
        out.put((rank, os.getpid(), None, 0.0))
    except dist.DistBackendError as error:
        out.put((rank, os.getpid(), str(error), time.monotonic() - last))
        dist.destroy_process_group()


def trial(seed: int) -> list[str]:
    """What is wrong with one trial."""
    choice = random.Random(seed)
    kind, size = KINDS[seed % len(KINDS)], choice.randint(2, 4)
    culprit, at = choice.randrange(size), choice.randrange(12)
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    wrong = []
    with TemporaryDirectory() as folder:
        args = (size, f"{folder}/store", kind, culprit, at, out)
        ranks = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        victims = [process for rank, process in enumerate(ranks) if rank != culprit]
        for process in victims:
            process.join(max(0.0, deadline - time.monotonic()))
        wrong += [f"{process.name} hangs" for process in victims if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
    name = f"rank {culprit} (host "
    limit = LIMIT_SECONDS + (TIMEOUT_SECONDS if kind == "stalled" else 0)
    told = {}
    while not out.empty():
        rank, _, error, seconds = out.get()
        told[rank] = error
        if error is None or name not in error or f"pid {ranks[culprit].pid})" not in error:
            wrong.append(f"rank {rank} says {error}")
        elif seconds > limit:
            wrong.append(f"rank {rank} needed {seconds:.1f} s")
    wrong += [f"rank {rank} said nothing" for rank in range(size) if rank != culprit and rank not in told]
    return [f"trial {seed} ({kind}, rank {culprit} of {size} at step {at}): {text}" for text in wrong]


def main() -> int:
    trials = int(sys.argv[1])
    before = {path.name for path in Path("/dev/shm").iterdir()}
    wrong = [text for seed in range(trials) for text in trial(seed)]
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    sys.stdout.write(json.dumps({"trials": trials, "wrong": wrong, "left": sorted(left)}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
