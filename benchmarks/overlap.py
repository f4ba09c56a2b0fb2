"""How much of an all-reduce between two emulated hosts moves while a rank computes, at 1 Gbit/s.

Times of an all-reduce alone, and of one that sets out before a computation: of our convolutions, which let bytes move,
and of NumPy's products, which do not. Then what a rank costs that waits for another one. Needs root,
iproute2 and mpi4py with MPICH or Open MPI.

    sudo .venv/bin/python -m benchmarks overlap
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

import numpy as np

from distopt import _core, comm, launch
from distopt.cli.values import at_least, positive

from .models import PARAMETERS
from .networks.emulation import RATES, two_hosts
from .output import import_this_checkout

# Bytes of the all-reduce, and seconds of the computation: about two thirds of what the bytes need.
CASES = ((4 * PARAMETERS, 0.010), (6_800_000, 0.040), (25_600_000, 0.150))


def convolve() -> None:
    x, w = np.ones((8, 20, 12, 12), np.float32), np.ones((50, 20, 5, 5), np.float32)
    dy, dw = np.ones((8, 50, 8, 8), np.float32), np.empty_like(w)
    _core.conv2d_backward(dy, None, x, w, dw, None, None, (1, 1), None)


def multiply() -> None:
    a = np.ones((128, 128), np.float32)
    a @ a


def run_rank(args: argparse.Namespace) -> None:
    job = launch.join()
    with comm.create(job, "mpi") as communicator:
        for n_bytes, seconds in CASES[: args.cases]:
            array = np.zeros(n_bytes // 4, np.float32)
            times = []
            for compute in (None, convolve, multiply):
                samples = []
                for _ in range(args.repeats):
                    communicator.barrier()
                    start = time.perf_counter()
                    work = communicator.all_reduce(array)
                    while compute and time.perf_counter() - start < seconds:
                        compute()
                    work.wait()
                    samples.append(time.perf_counter() - start)
                times.append(median(samples) * 1e3)
            if job.topology.rank == 0:
                alone, ours, others = times
                print(
                    f"{n_bytes:>10,} bytes: alone {alone:6.1f} ms; beside {seconds * 1e3:.0f} ms of convolutions "
                    f"{ours:6.1f} ms, of products {others:6.1f} ms",
                    flush=True,
                )
        wait(communicator, args.wait)


def wait(communicator: comm.Communicator, seconds: float) -> None:
    communicator.barrier()
    if communicator.topology.rank == 1:
        time.sleep(seconds)
    start, used = time.perf_counter(), time.process_time()
    communicator.barrier()
    waited, used = time.perf_counter() - start, time.process_time() - used
    if communicator.topology.rank == 0:
        print(f"a wait of {waited:.1f} s: {used / waited:.1%} of a core", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", choices=RATES, default="1gbit", help="of the link (1gbit)")
    parser.add_argument("--cases", type=at_least(1), default=len(CASES), metavar="N", help="the first of the sizes (3)")
    parser.add_argument("--repeats", type=at_least(1), default=8, metavar="N", help="of each measurement (8)")
    parser.add_argument("--wait", type=positive, default=5.0, metavar="SECONDS", help="how long a rank waits (5)")
    parser.add_argument("--as-rank", action="store_true", help="(what the ranks are started with)")


def run(args: argparse.Namespace) -> None:
    if args.as_rank:
        run_rank(args)
        return
    import_this_checkout()
    with two_hosts() as net:
        for host in net.hosts:
            host.shape(args.rate)
        options = ["--cases", str(args.cases), "--repeats", str(args.repeats), "--wait", str(args.wait)]
        rank = [sys.executable, "-m", "benchmarks", "overlap", "--as-rank", *options]
        subprocess.run(net.mpiexec(1, rank), check=True)
