"""Run a command on emulated hosts of this machine, with delay, a limit of rate, and loss between them.

Each host has its name, and the variables MASTER_ADDR, MASTER_PORT, NODE_RANK and GLOO_SOCKET_IFNAME; RANK, WORLD_SIZE,
LOCAL_RANK and LOCAL_WORLD_SIZE say that the command is the only rank of its host, unless a launcher says otherwise. The
exit code is the first that is not 0, in the order of hosts. Needs root; see `networks.far`.

    sudo .venv/bin/python -m benchmarks hosts --delay 40 -- .venv/bin/python examples/pytorch/tensor_parallel.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from .networks.emulation import LINK, Host
from .networks.far import add_link, far_hosts, link_of, number_of_hosts

PORT = 29_500  # PyTorch's; the hosts have ports of their own
_END_SECONDS = 5.0  # after which processes that have not heeded a signal are killed


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=number_of_hosts, default=2, metavar="H", help="number of hosts (2)")
    add_link(parser)
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --, to run on each host")


def run(args: argparse.Namespace) -> int:
    """Run the command on all hosts at once; return its exit code."""
    link = link_of(args)
    sys.stderr.write(f"# {args.hosts} hosts; {link}\n")
    with far_hosts(args.hosts, link) as hosts:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += (subprocess.Popen(on(hosts, number, args.command)) for number in range(args.hosts))
            codes = [process.wait() for process in processes]
        finally:
            _end(processes)
    return next((128 - code if code < 0 else code for code in codes if code), 0)


def on(hosts: Sequence[Host], number: int, command: Sequence[str]) -> list[str]:
    """The words that run `command` on the host of this number."""
    variables = {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": PORT,
        "NODE_RANK": number,
        "GLOO_SOCKET_IFNAME": LINK,
        "RANK": number,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }
    return hosts[number].inside(["env", *(f"{name}={value}" for name, value in variables.items()), *command])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # noqa: PERF203 - seconds have passed
            process.kill()
            process.wait()
