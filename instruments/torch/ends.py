"""Scripts that just end: with unfinished operations, with threads in C++, and right after their ranks have met.

    python -m instruments.torch.ends --runs 500

starts the programs below in turn, with and without `destroy_process_group`, by several launchers, with two and three
ranks, so many at a time that all cores are busy, and prints the output of each that has not ended with code 0.
"""

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import distopt.torch  # registers the backend
from distopt import codecs, opt, singa_wrap
from tests.ranks.small_net import SMALL, build, train

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("distopt run", "torchrun", "spawn")
LIMIT_SECONDS = 500.0  # for one run under load
place: list[Any] = []  # of a rank without a launcher: its ticket, rank and size, as `DistOpt` takes them


def command(launcher: str, ranks: int, program: str, *, destroys: bool) -> list[str]:
    """The command line of one run."""
    args = [program, *(["--destroy"] if destroys else [])]
    python = [sys.executable, "-W", "ignore"]
    if launcher == "spawn":
        return [*python, "-m", "instruments.torch.ends", "--spawn", str(ranks), *args]
    modules = {"distopt run": "distopt run", "torchrun": "torch.distributed.run"}
    launch = [*modules[launcher].split(), "--nproc-per-node", str(ranks)]
    if launcher == "torchrun":
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [*python, "-m", *launch, __file__, *args]


def run(launcher: str, ranks: int, program: str, *, destroys: bool) -> tuple[int, str]:
    """The exit code of one run, and what it has written."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    line = command(launcher, ranks, program, destroys=destroys)
    try:
        with TemporaryDirectory() as env["ENDS_FOLDER"]:
            ended = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired as error:
        return -1, f"no end within {LIMIT_SECONDS:g} s\n{error.stdout!r}\n{error.stderr!r}"
    return ended.returncode, f"{ended.stdout}\n{ended.stderr}"


# -- the ranks' side ---------------------------------------------------------------------------------------------------
def main_of_rank(program: str, *, destroys: bool, **place: Any) -> list[object]:
    """Run one; what it leaves behind, which lives until the process ends."""
    torch.set_num_threads(1)
    dist.init_process_group("distopt", **place)
    left = PROGRAMS[program](dist.get_rank(), dist.get_world_size())
    if destroys:
        dist.destroy_process_group()
    return left


def messages_waited_for(rank: int, size: int) -> list[object]:
    out = torch.empty(200_000)
    to, source = (rank + 1) % size, (rank - 1) % size
    ops = [dist.P2POp(dist.isend, torch.full((200_000,), float(rank)), to), dist.P2POp(dist.irecv, out, source)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert bool((out == source).all())
    return []


def messages_left(rank: int, size: int) -> list[object]:
    sent = dist.isend(torch.full((200_000,), float(rank)), (rank + 1) % size)
    return [sent, dist.irecv(torch.empty(200_000), (rank - 1) % size)]


def messages_of_other_sizes(rank: int, size: int) -> list[object]:
    """Two receives fail, whichever is waited for first, and whether messages or collectives come next."""
    if rank == 0:
        return [dist.isend(torch.ones(4), 1), dist.isend(torch.ones(3), 1, tag=1)]
    if rank > 1:
        return []
    works = [dist.irecv(torch.zeros(2), 0), dist.irecv(torch.zeros(3, dtype=torch.float64), 0, tag=1)]
    errors = [error_of(work) for work in works]
    assert all(errors), errors
    return [works, errors]


def error_of(work: dist.Work) -> RuntimeError | None:
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return None


def sums_left(rank: int, size: int) -> list[object]:
    return [dist.all_reduce(torch.full((50_000,), float(rank)), async_op=True) for _ in range(20)]


def futures_left(rank: int, size: int) -> list[object]:
    works = [dist.all_reduce(torch.full((50_000,), float(rank)), async_op=True) for _ in range(5)]
    return [work.get_future().then(lambda future: future.value()[0].sum()) for work in works]


def callbacks_left(rank: int, size: int) -> list[object]:
    """Callbacks that call collectives."""

    def again(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        dist.all_reduce(future.value()[0])

    works = [dist.all_reduce(torch.full((5_000,), float(rank)), async_op=True) for _ in range(5)]
    return [work.get_future().then(again) for work in works]


def groups(rank: int, size: int) -> list[object]:
    made = [dist.new_group(list(range(size))) for _ in range(4)]
    works = [dist.all_reduce(torch.ones(50_000), group=group, async_op=True) for group in made]
    works[2].wait()
    return works


def nothing(rank: int, size: int) -> list[object]:
    return []


def a_new_group(rank: int, size: int) -> list[object]:
    return [dist.new_group(list(range(size))), dist.group.WORLD.monitored_barrier()]


def a_split_group(rank: int, size: int) -> list[object]:
    return [dist.group.WORLD.split_group(list(range(size)), group_name="split")]


def trained(model: Any, parameters: Any) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()


def ddp(rank: int, size: int) -> list[object]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 300), bucket_cap_mb=0.01)
    trained(model, model.parameters())
    return []


def ddp_by_power_sgd(rank: int, size: int) -> list[object]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 300), bucket_cap_mb=0.01)
    model.register_comm_hook(power_sgd.PowerSGDState(None, start_powerSGD_iter=2), power_sgd.powerSGD_hook)
    trained(model, model.parameters())
    return []


def fsdp2(rank: int, size: int) -> list[object]:
    from torch.distributed.fsdp import fully_shard  # in seconds

    layers = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    fully_shard(layers[0])
    fully_shard(layers)
    trained(layers, layers.parameters())
    return []


def dtensor(rank: int, size: int) -> list[object]:
    """PyTorch keeps the group of its mesh until the process ends."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = dist.init_device_mesh("cpu", (size,)), torch.arange(12.0)
    assert torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    return []


def codec(rank: int, size: int) -> list[object]:
    """A loop of `DistOpt`, whose ranks have nothing to do with the group's, by top-K."""
    sgd = opt.DistOpt(opt.SGD(lr=0.1), *place, bucket_elements=SMALL)
    net = build(sgd)
    return [net, train(sgd, net, range(3), codecs.TopK(0.1))]


def a_save_under_way(rank: int, size: int) -> list[object]:
    model = torch.nn.Linear(2_000, 500)
    checkpoint = distopt.torch.Checkpoint(os.environ["ENDS_FOLDER"], model=model)
    checkpoint.resume()
    checkpoint.save()
    return [checkpoint]


PROGRAMS: dict[str, Callable[[int, int], list[object]]] = {
    function.__name__: function
    for function in (
        *(messages_waited_for, messages_left, messages_of_other_sizes, sums_left, futures_left, callbacks_left),
        *(groups, nothing, a_new_group, a_split_group, ddp, ddp_by_power_sgd, fsdp2, dtensor, codec, a_save_under_way),
    )
}


def spawned(rank: int, size: int, ticket: Any, store: str, program: str, destroys: bool) -> None:
    place[:] = ticket, rank, size
    main_of_rank(program, destroys=destroys, init_method=f"file://{store}", rank=rank, world_size=size)


# -- many runs ---------------------------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="?", choices=PROGRAMS)
    parser.add_argument("--destroy", action="store_true")
    parser.add_argument("--spawn", type=int, help="ranks to start by torch.multiprocessing")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--only", default=",".join(PROGRAMS))
    args = parser.parse_args()
    if args.spawn:
        with TemporaryDirectory() as folder:
            given = args.spawn, singa_wrap.NcclIdHolder(), f"{folder}/store", args.program, args.destroy
            torch.multiprocessing.spawn(spawned, given, args.spawn)
        return 0
    if args.program:
        globals()["left"] = main_of_rank(args.program, destroys=args.destroy)
        return 0
    cases = list(itertools.product(args.only.split(","), (False, True), LAUNCHERS, (2, 3)))
    random.Random(1).shuffle(cases)
    failures: Counter[str] = Counter()
    began = time.monotonic()

    def one(case: tuple[str, bool, str, int]) -> None:
        program, destroys, launcher, ranks = case
        code, text = run(launcher, ranks, program, destroys=destroys)
        if code != 0 or re.search("Traceback|terminate called", text):
            failures[program] += 1
            print(f"{program}, destroys: {destroys}, {launcher}, {ranks} ranks: code {code}\n{text}", flush=True)

    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        for done, _ in enumerate(pool.map(one, itertools.islice(itertools.cycle(cases), args.runs)), 1):
            if done % 100 == 0:
                print(f"{done} runs, {failures.total()} failed", flush=True)
    seconds = time.monotonic() - began
    print(f"{args.runs} runs in {seconds:.0f} s, {failures.total()} failed {dict(failures) or ''}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
