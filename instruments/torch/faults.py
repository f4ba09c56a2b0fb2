"""A DDP training in which one rank fails. Run by test_hosts.py and test_launch.py, and by hand for many random trials:

    python -m instruments.torch.faults 50
    python -m instruments.torch.faults 30 --hosts

In every trial one rank, at a random step, is killed, stalls, or calls another collective or one of another shape; on
two emulated hosts, the link may be cut, or lose all packets. Every other rank must end within 5 s (after a stall or a
cut: the group's time-out more) with a DistBackendError that names rank and pid, and those left make a new group.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distopt.torch  # noqa: F401 - registers the backend
from benchmarks.networks.emulation import TwoHosts, two_hosts
from tests.processes import patience
from tests.torch.forked import CONTEXT, Place, join

KINDS = ("killed", "stalled", "another collective", "another shape")
CUTS = ("cut", "cut silently")
TIMEOUT_SECONDS = 3.0
LIMIT_SECONDS = 5.0
AWAY = ("killed", "stalled")  # the culprit has no part in the new group


def rank_main(
    rank: int, place: Place, method: str, seconds: float, fault: tuple[str, int, int], goes_on: Event, out: Queue[tuple]
) -> None:
    kind, culprit, at = fault
    join(rank, place.size, method, seconds)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    last = time.monotonic()
    try:
        for step in range(1_000_000 if kind in CUTS else at + 3):
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
                    case _:
                        out.put((rank, "at the step", 0.0))
            model(torch.randn(8, 50)).square().mean().backward()
            last = time.monotonic()
        out.put((rank, None, 0.0))
    except dist.DistBackendError as error:
        out.put((rank, str(error), time.monotonic() - last))
    dist.destroy_process_group()
    goes_on.wait()
    left = [q for q in range(place.size) if q != culprit or kind not in AWAY]
    join(left.index(rank), len(left), method, 60, "again")
    tensor = torch.arange(40_000.0) + rank
    dist.all_reduce(tensor)
    if torch.equal(tensor, torch.arange(40_000.0) * len(left) + sum(left)):
        out.put((rank, "again", 0.0))
    dist.destroy_process_group()


def trial(seed: int, net: TwoHosts | None, folder: str) -> list[str]:
    """What is wrong with one trial."""
    choice = random.Random(seed)
    kinds = (*KINDS, *(CUTS if net else ()))
    kind, counts = kinds[seed % len(kinds)], [choice.randint(2, 4)]
    if net:
        counts = choice.choice([[1, 1], [2, 1], [1, 2], [2, 2]])
    place = Place(counts, net, f"{folder}/{seed}-")
    culprit, at = choice.randrange(place.size), choice.randrange(12)
    goes_on, out = CONTEXT.Event(), CONTEXT.Queue()
    method = place.method()
    place.keep_store(method)
    timeout = patience(TIMEOUT_SECONDS if kind in ("stalled", *CUTS) else 60)
    ranks = place.start(rank_main, place, method, timeout, (kind, culprit, at), goes_on, out)
    left = [rank for rank in range(place.size) if rank != culprit or kind not in AWAY]
    wrong = []
    if net and kind in CUTS:
        gathered(out, 1, 60)
        net.cut(silently=kind == "cut silently")
    pids = [process.pid for process in ranks]
    for rank, error, seconds in (told := gathered(out, len(left), 60)):
        culprits = place.peers_of(rank) if kind in CUTS else [culprit]
        wanted = (f"rank {q} (host {place.host_name(q)}, pid {pids[q]})" for q in culprits)
        if error is None or not any(name in error for name in wanted):
            wrong.append(f"rank {rank} says {error}")
        elif seconds > patience(LIMIT_SECONDS) + (timeout if kind in ("stalled", *CUTS) else 0):
            wrong.append(f"rank {rank} needed {seconds:.1f} s")
    wrong += [f"rank {rank} said nothing" for rank in sorted({*left} - {rank for rank, *_ in told})]
    if net and kind in CUTS:
        net.mend()
    if kind == "stalled":
        ranks[culprit].kill()
    goes_on.set()
    if not wrong:
        again = {rank for rank, *_ in gathered(out, len(left), 60)}
        wrong += [f"rank {rank} is not in the new group" for rank in sorted({*left} - again)]
    for process in ranks:
        process.join(0 if wrong else 20)
        process.kill()
        process.join()
    return [f"trial {seed} ({kind}, rank {culprit} of {counts} at step {at}): {text}" for text in wrong]


def gathered(out: Queue[tuple], count: int, seconds: float) -> list[tuple]:
    """Reports of `count` ranks, or of as many as come in time."""
    deadline = time.monotonic() + patience(seconds)
    said: list[tuple] = []
    with suppress(queue.Empty):
        while len(said) < count:
            said.append(out.get(timeout=max(0.0, deadline - time.monotonic())))
    return said


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial (0)")
    parser.add_argument("--hosts", action="store_true", help="on two emulated hosts")
    args = parser.parse_args(words)
    before = {path.name for path in Path("/dev/shm").iterdir()}
    wrong = []
    with ExitStack() as stack:
        net = stack.enter_context(two_hosts("-faults")) if args.hosts else None
        folder = stack.enter_context(TemporaryDirectory())
        for seed in range(args.first, args.first + args.trials):
            wrong += trial(seed, net, folder)
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    sys.stdout.write(json.dumps({"trials": args.trials, "wrong": wrong, "left": sorted(left)}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
