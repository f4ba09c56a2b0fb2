"""A killed rank, and a lost node: seconds to the first new step and steps lost, by distopt and by torchrun.

A DDP job of two ranks, with steps of 50 ms; one of them gets SIGKILL, or its node's agent does, on the other one of two
emulated hosts. torchrun starts the ranks again, which load what they save every so many steps; `distopt run --heal` needs no
files. The first new step is the first that is done after the fault; a lost step is done twice. The jobs take turns.

    python -m benchmarks killed --times 5
    sudo .venv/bin/python -m benchmarks killed --times 5 --lost rank,node
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

from distopt.cli.values import at_least
from distopt.errors import DistoptError

from .networks.emulation import LINK, TwoHosts, two_hosts
from .options import names_of
from .output import ROOT, heading, machine
from .pytorch import print_head, print_row

SCRIPT = str(Path(__file__).parent / "peers" / "ranks" / "killed.py")
LIMIT_SECONDS = 180.0
PORT = 29_517
LOST = ("rank", "node")
WAYS = ("torchrun", "distopt")


class Job:
    """A job under way: its agents, and the steps that rank 0 has done, with their times."""

    def __init__(self, way: str, folder: Path, every: int, net: TwoHosts | None) -> None:
        self.steps: list[tuple[float, int]] = []
        self.pids: list[int] = []
        module = "torch.distributed.run" if way == "torchrun" else "distopt"
        command = [sys.executable, "-W", "ignore", "-m", module, *(["--heal"] if way == "distopt" else [])]
        if way == "distopt":
            command.insert(-1, "run")
        else:
            command += ["--max-restarts", "100"]
        script = [SCRIPT, str(folder), str(every)] if way == "torchrun" else [SCRIPT]
        if net is None:
            commands = [[*command, "--standalone", "--nproc-per-node", "2", *script]]
        else:
            meet = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
            commands = []
            for number, host in enumerate(net.hosts):
                # torchrun looks addresses up by the host's name, which both hosts have in common here.
                own = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}"]
                own = [*own, "--rdzv-backend", "c10d", "--rdzv-id", "killed"] if way == "torchrun" else []
                commands.append(host.inside([*command, *meet, *own, *script]))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": LINK} if net is not None else {}
        self.agents = []
        for number, each in enumerate(commands):
            agent = subprocess.Popen(
                each, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
            )
            self.agents.append(agent)
            threading.Thread(target=self._read, args=(agent,), daemon=True).start()
            if number == 0 and net is not None:
                time.sleep(1.0)  # the first one owns the endpoint

    def _read(self, agent: subprocess.Popen[str]) -> None:
        for line in agent.stdout or ():
            if match := re.search(r"step (\d+)$", line):
                self.steps.append((time.monotonic(), int(match[1])))
            elif match := re.search(r"rank 1 is (\d+)$", line):
                self.pids.append(int(match[1]))

    def wait(self, number: int) -> None:
        """Wait until so many steps have been done."""
        end = time.monotonic() + LIMIT_SECONDS
        while len(self.steps) < number:
            if time.monotonic() > end:
                raise DistoptError(f"no further step within {LIMIT_SECONDS:g} s, after {len(self.steps)}")
            time.sleep(0.002)

    def end(self) -> None:
        """Kill all its processes."""
        for agent in self.agents:
            agent.kill()
        for agent in self.agents:
            agent.wait()
        subprocess.run(["pkill", "-KILL", "-f", SCRIPT], check=False)


def cost(way: str, lost: str, every: int, after: int, net: TwoHosts | None) -> tuple[float, int]:
    """The seconds to the first new step after a loss, and the steps lost."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(way, Path(folder), every, net)
        try:
            job.wait(after)
            while not job.pids:  # the other node has not come yet
                job.wait(len(job.steps) + 1)
            at = time.monotonic()
            if lost == "node":
                job.agents[1].kill()
                subprocess.run(["pkill", "-KILL", "-P", str(job.agents[1].pid)], check=False)
            os.kill(job.pids[-1], signal.SIGKILL)
            time.sleep(0.2)  # steps that were under way have been printed
            done = len(job.steps)
            reached = job.steps[-1][1]
            job.wait(done + 1)
            when, first = job.steps[done]
            return when - at, reached - (first - 1)
        finally:
            job.end()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lost", type=names_of(LOST), default=["rank"], help="rank,node; node needs root (rank)")
    parser.add_argument("--only", type=names_of(WAYS), default=list(WAYS), help="(torchrun,distopt)")
    parser.add_argument("--times", type=at_least(1), default=5, metavar="N", help="faults of each job (5)")
    parser.add_argument(
        "--every", type=at_least(1), default=50, metavar="N", help="steps between torchrun's files (50)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the faults (1)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a job of distopt did not go on: one of torchrun's that did not is a result."""
    print(f"# {heading(machine())}; {args.times} faults of each job", flush=True)
    print_head("lost", "job", "went on", "first new step, median", "most", "steps lost, median", "most")
    failed = False
    for lost in args.lost:
        numbers, found = random.Random(args.seed), {way: list[tuple[float, int]]() for way in args.only}
        for _ in range(args.times):
            after = numbers.randint(60, 60 + args.every)
            for way in args.only:
                with two_hosts() if lost == "node" else nullcontext() as net:
                    try:
                        found[way].append(cost(way, lost, args.every, after, net))
                    except DistoptError as error:
                        print(f"# {way}, {lost}: {error}", flush=True)
                        failed |= way == "distopt"
        for way, costs in found.items():
            cells = ["-"] * 4
            if costs:
                seconds, steps = zip(*costs, strict=True)
                cells = [f"{median(seconds):.2f} s", f"{max(seconds):.2f} s", f"{median(steps):g}", f"{max(steps)}"]
            print_row(f"a {lost}", way, f"{len(costs)} of {args.times}", *cells)
    return int(failed)
