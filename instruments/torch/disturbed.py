"""A job of DDP is killed and preempted at random moments, and must end with the bits of an undisturbed one.

    sudo .venv/bin/python -m instruments.torch.disturbed --backend gloo --hosts 2 --kills 10 --steps 1000

Two ranks on each host; two hosts are network namespaces.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.networks.emulation import LINK, TwoHosts, two_hosts
from tests.processes import Ended, Program

PORT = 29_470
# Gloo's own choice of an interface is loopback there.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}


def start(net: TwoHosts, hosts: int, folder: Path, *options: str) -> list[Program]:
    place = ["--nnodes", str(hosts), "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
    run = [sys.executable, "-W", "ignore", "-m", "distopt", "run", "--nproc-per-node", "2", *place]
    line = [*run, "-m", "instruments.torch.resumed", "--folder", str(folder), *options]
    return [Program(host.inside(line), ENVIRONMENT) for host in net.hosts[:hosts]]


def last_lines(ended: list[Ended]) -> list[str]:
    """Of each rank, the digest with which it has ended."""
    assert all(one.code == 0 for one in ended), ended
    return sorted(line.split("] ")[-1] for one in ended for line in one.stdout.splitlines() if "ends with" in line)


def disturb(net: TwoHosts, hosts: int, folder: Path, signals: list[int], numbers: random.Random, *options: str) -> int:
    """Compare with an undisturbed run; how many of the signals came while ranks trained."""
    want = last_lines([program.end() for program in start(net, hosts, folder / "undisturbed", *options)])
    assert len(want) == 2 * hosts
    came = 0
    for signum in signals:
        programs = start(net, hosts, folder / "disturbed", *options)
        programs[0].read_lines(1)  # its ranks train
        time.sleep(numbers.uniform(0.0, 1.0))
        # SIGKILL of an agent kills its ranks; the other host's notice. SIGTERM reaches the ranks of one host.
        programs[0].process.send_signal(signum)
        codes = [program.end().code for program in programs]
        came += any(codes)
    have = last_lines([program.end() for program in start(net, hosts, folder / "disturbed", *options)])
    assert have == want, (have, want)
    return came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="distopt")
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", default="1000")
    parser.add_argument("--seed", type=int, default=7)
    args, options = parser.parse_known_args()
    numbers = random.Random(args.seed)
    signals = [signal.SIGKILL] * args.kills + [signal.SIGTERM] * 2
    numbers.shuffle(signals)
    with two_hosts() as net, tempfile.TemporaryDirectory() as folder:
        options += ["--backend", args.backend, "--steps", args.steps]
        came = disturb(net, args.hosts, Path(folder), signals, numbers, *options)
    print(f"{args.backend}, {args.hosts} x 2 ranks: disturbed {came} times, the undisturbed bits", flush=True)


if __name__ == "__main__":
    main()
