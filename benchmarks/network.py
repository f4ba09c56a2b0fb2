"""Two hosts at 1 Gbit/s and at 100 Mbit/s: steps per second and bytes per step for every codec, and for PyTorch DDP.

The hosts are network namespaces of this machine, joined by a veth pair whose ends are shaped by tc's token bucket.
Needs root, iproute2 and MPICH with mpi4py; PyTorch gets an environment of its own. Everything is removed again, even
after a failure.

    sudo .venv/bin/python -m benchmarks network --steps 60
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from distopt.cli.values import at_least

from . import output
from .networks.emulation import LINK, TwoHosts, two_hosts
from .networks.site import EmulatedSite
from .options import names_of
from .output import ROOT, machine, put
from .peers.lineup import Lineup, distopt_crew, torch_crew

RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
WARM_UP_STEPS = 5
# Added to the setup of `ranks.train_distopt` and `ranks.train_torch`.
SENT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"codec": {"name": "fp16"}},
    "partial update": {"partial": True},
    "top-K 5 %": {"codec": {"name": "top-k", "ratio": 0.05, "error_feedback": True}},
    "top-K 1 %": {"codec": {"name": "top-k", "ratio": 0.01, "error_feedback": True}},
    "top-K 0.1 %": {"codec": {"name": "top-k", "ratio": 0.001, "error_feedback": True}},
    "threshold 0.01": {"codec": {"name": "threshold", "bound": 0.01, "error_feedback": True}},
    "PowerSGD rank 2": {"codec": {"name": "power-sgd", "rank": 2, "error_feedback": True}},
}
DDP = {
    "PyTorch DDP fp32": {},
    "PyTorch DDP fp16 hook": {"hook": "fp16"},
    "PyTorch DDP PowerSGD hook, rank 2": {"hook": "power-sgd"},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=at_least(1), default=60, metavar="N", help="timed steps of each row (60)")
    parser.add_argument("--rates", type=names_of(RATES.values()), default=list(RATES.values()), help="(1gbit,100mbit)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/network.md", help="page with the marks")


def run(args: argparse.Namespace) -> None:
    records: dict[str, dict[str, dict[str, float]]] = {}
    rates: dict[str, float] = {}
    with two_hosts() as net:
        for label, rate in RATES.items():
            if rate not in args.rates:
                continue
            for host in net.hosts:
                host.shape(rate)
            rates[label] = link_rate(net)
            records[label] = {}
            for row, options in {**SENT, **DDP}.items():
                record = records[label][row] = measure(net, row, options, args.steps)
                print(f"{label}: {row}: {record['steps_per_second']:.1f} steps/s", flush=True)
    put(args.output, "network", page(records, rates, args.steps))


def link_rate(net: TwoHosts, megabytes: int = 10) -> float:
    """Mbit/s of one TCP connection, measured."""
    first, second = net.hosts
    receive = (
        "import socket, time; server = socket.create_server(('', 5001)); print(flush=True); peer, _ = server.accept()\n"
        "start, n = time.perf_counter(), 0\n"
        "while data := peer.recv(1 << 16): n += len(data)\n"
        "print(n * 8e-6 / (time.perf_counter() - start))"
    )
    send = f"import socket; socket.create_connection(('{second.address}', 5001)).sendall(bytes({megabytes * 10**6}))"
    receiver = subprocess.Popen(second.inside([sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True)
    try:
        receiver.stdout.readline()
        subprocess.run(first.inside([sys.executable, "-c", send]), check=True, timeout=60)
        return float(receiver.communicate(timeout=60)[0])
    finally:
        receiver.kill()


def measure(net: TwoHosts, row: str, options: dict[str, Any], steps: int) -> dict[str, float]:
    """Steps of one row, with ranks of its own. DistoptError if they fail."""

    def start() -> tuple[Any, dict[str, Any]]:
        site = EmulatedSite(net, 1)
        crew, setup = torch_crew("train", site) if row in DDP else distopt_crew("train", site, "mpi")
        return crew, {**setup, **options, "batch_size": 64}

    with Lineup() as lineup:
        lineup.add(row, start)
        answer = lineup.ask(1, {"steps": steps, "warm_up": WARM_UP_STEPS, "interface": LINK})[row][0][0]
    record = {"steps_per_second": steps / sum(answer["seconds"]), "interface_bytes": answer["interface_bytes"] / steps}
    return record | ({"bytes": answer["sent_bytes"] / steps} if row in SENT else {})


def table(records: dict[str, dict]) -> str:
    fp32, ddp = (records[name]["steps_per_second"] for name in ("fp32", "PyTorch DDP fp32"))
    rows = []
    for name, record in records.items():
        speed = record["steps_per_second"]
        own = f"{record['bytes'] / 1e3:.1f} kB" if "bytes" in record else ""
        ratios = f"{speed / fp32:.2f}", f"{speed / ddp:.2f}"
        rows.append([name, f"{speed:.1f}", *ratios, own, f"{record['interface_bytes'] / 1e3:.1f} kB"])
    head = ["sent", "steps/s", "of fp32", "of DDP fp32", "sent per step and rank", "through the interface"]
    return output.table(head, rows)


def page(records: dict[str, dict], rates: dict[str, float], steps: int) -> str:
    facts = machine()
    parts = [f"{facts['cores']} cores of {facts['processor']}; {steps} timed steps of each row."]
    parts += [
        f"### {label}\n\nOne TCP connection carries {rates[label]:.0f} Mbit/s.\n\n{table(record)}"
        for label, record in records.items()
    ]
    return "\n\n".join(parts)
