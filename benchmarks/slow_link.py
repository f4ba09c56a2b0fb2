"""MNIST by PyTorch over a slow link between two hosts: seconds to 98.0 % and to 98.5 %, for each way to send less.

The steps that a run needs depend on its seed as much as on the way: a row is the median over seeds.

The hosts are network namespaces of this machine; see `networks.emulation`. Needs root, and PyTorch in this environment.

    sudo .venv/bin/python -m benchmarks slow-link --rates 100mbit,10mbit --ranks 1,2
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distopt.cli.values import at_least
from distopt.errors import DistoptError

from . import output
from .networks.emulation import LINK, TwoHosts, two_hosts
from .options import names_of
from .output import ROOT, machine, put

EXAMPLE = ROOT / "examples" / "pytorch" / "mnist_slow_link.py"
RATES = ("100mbit", "10mbit")
PORT = 29_411
# Label: way of the example and backend of its group. PyTorch's own come first.
ROWS = {
    "DDP over Gloo, fp32": ("ddp", "gloo"),
    "DDP over Gloo, PyTorch's fp16 hook": ("ddp-fp16", "gloo"),
    "DDP over Gloo, PyTorch's PowerSGD hook": ("ddp-power-sgd", "gloo"),
    "DDP over distopt, PyTorch's PowerSGD hook": ("ddp-power-sgd", "distopt"),
    "DDP over distopt, fp32": ("ddp", "distopt"),
    "hook fp16": ("hook-fp16", "distopt"),
    "hook top-K 1 %": ("hook-top-k", "distopt"),
    "hook PowerSGD": ("hook-power-sgd", "distopt"),
    "DistOpt top-K 1 %": ("top-k", "distopt"),
    "DistOpt PowerSGD": ("power-sgd", "distopt"),
    "DiLoCo": ("diloco", "distopt"),
    "DiLoCo every 15 steps, fp16": ("diloco-half", "distopt"),
    "DiLoCo every 15 steps, top-K 10 %": ("diloco-sparse", "distopt"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=names_of(RATES), default=list(RATES), help="(100mbit,10mbit)")
    parser.add_argument("--ranks", type=names_of(("1", "2")), default=["1", "2"], help="on each host (1,2)")
    parser.add_argument("--only", type=names_of(way for way, _ in ROWS.values()), help="ways of the example (all)")
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each row (3)")
    parser.add_argument("--seconds", type=at_least(1), default=300, metavar="S", help="most of training, per row (300)")
    parser.add_argument("--data", type=Path, help="folder of MNIST (default: as the example finds it)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/network.md", help="page with the marks")


def run(args: argparse.Namespace) -> None:
    facts = machine()
    parts = [f"{facts['cores']} cores of {facts['processor']}."]
    with two_hosts() as net:
        for rate in args.rates:
            for host in net.hosts:
                host.shape(rate)
            for ranks in args.ranks:
                found = {}
                for label, (way, backend) in ROWS.items():
                    if args.only is None or way in args.only:
                        runs = [train(net, int(ranks), way, backend, seed, args) for seed in range(1, args.seeds + 1)]
                        found[label] = [median(cells) for cells in zip(*runs, strict=True)]
                        print(f"{rate}, {ranks} on each host: {label}: {runs}", flush=True)
                place = f"{rate.replace('mbit', ' Mbit/s')}, ranks on each host: {ranks}, seeds: {args.seeds}"
                head = ["sent", "s to 98.0 %", "s to 98.5 %", "steps/s"]
                rows = ([label, *cells] for label, cells in found.items())
                parts.append(f"### {place}\n\n{output.table(head, rows)}")
    put(args.output, "slow-link", "\n\n".join(parts))


def median(cells: Sequence[float]) -> str:
    """In a table; empty if infinite."""
    middle = statistics.median(cells)
    return f"{middle:.1f}" if math.isfinite(middle) else ""


def train(net: TwoHosts, ranks: int, way: str, backend: str, seed: int, args: argparse.Namespace) -> list[float]:
    """Run the example on both hosts; the seconds to both goals, infinite if missed, and the steps per second.

    Raises:
        DistoptError: it has failed.
    """
    words = ["--way", way, "--backend", backend, "--seed", str(seed), "--seconds", str(args.seconds)]
    words += [] if args.data is None else ["--data", str(args.data)]
    processes = []
    for node, host in enumerate(net.hosts):
        launch = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--node-rank", str(node)]
        launch += ["--master-addr", net.hosts[0].address, "--master-port", str(PORT)]
        env = ["env", f"GLOO_SOCKET_IFNAME={LINK}", "OMP_NUM_THREADS=1"]
        command = [*env, sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *launch, str(EXAMPLE), *words]
        out = subprocess.DEVNULL if node else subprocess.PIPE  # rank 0 prints
        processes.append(subprocess.Popen(host.inside(command), stdout=out, text=True))
    try:
        text, _ = processes[0].communicate()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
    if any(codes):
        raise DistoptError(f"{way} has failed, with exit codes {codes}; its errors are above")
    goals = dict(re.findall(r"([\d.]+)% after ([\d.]+) s", text))
    (speed,) = re.findall(r"at the end, ([\d.]+) steps/s", text)
    return [float(goals.get("98.0", "inf")), float(goals.get("98.5", "inf")), float(speed)]
