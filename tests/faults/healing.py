"""Faults at a job that heals, again and again: how much of its time counts.

    sudo .venv/bin/python -m tests.faults.healing --minutes 10 --every 15
    sudo .venv/bin/python -m tests.faults.healing --hosts 2 --kinds SIGKILL,SIGSTOP,link,agent --minutes 10 -- SCRIPT

Runs a job (default: `tests.ranks.healed`) undisturbed, then with a fault every so many seconds, and compares times and
the digests with which both have ended. Two hosts are network namespaces, with two ranks each, and need root. A link is
cut for 1 to 5 s, which do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.networks.emulation import LINK, TwoHosts, two_hosts
from tests.processes import ROOT, patience

RUN = [sys.executable, "-W", "ignore", "-m", "distopt", "run", "--nproc-per-node", "2"]
JOB = ["-m", "tests.ranks.healed"]
SECONDS = 120.0
PORT = 29_484


class Job:
    """Agents of a job, one for each of `lines`, and all that they print."""

    def __init__(self, *commands: list[str]) -> None:
        self.commands = commands
        self.lines: list[str] = []
        self.agents: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for command in commands:
            self.start(command)

    def start(self, command: list[str]) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
        agent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.agents.append(agent)
        self._readers.append(threading.Thread(target=self._read, args=(agent,)))
        self._readers[-1].start()

    def _read(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        with agent.stdout:
            self.lines.extend(line.rstrip("\n") for line in agent.stdout)

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """All lines that the pattern matches, once there are so many."""
        end = time.monotonic() + patience(SECONDS)
        while len(found := [m for m in (re.search(pattern, line) for line in list(self.lines)) if m]) < count:
            assert time.monotonic() < end, self.lines
            assert any(agent.poll() is None for agent in self.agents), self.lines
            time.sleep(0.01)
        return found

    def more_steps(self) -> None:
        self.wait_for(r"step \d+$", sum(line.startswith("step ") for line in list(self.lines)) + 1)

    def pid_of(self, rank: int) -> int:
        """Of its newest process."""
        return int(self.wait_for(rf"rank {rank} is (\d+)")[-1][1])

    def fork_server(self, agent: int = 0, before: int = 0) -> int:
        """Wait for that of an agent, which is not the one `before`."""
        pid, end = self.agents[agent].pid, time.monotonic() + patience(SECONDS)
        while time.monotonic() < end:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):  # it has ended
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    if name == "distopt forks" and int(child) != before:
                        return int(child)
            time.sleep(0.01)
        raise AssertionError(self.lines)

    def finished(self, seconds: float) -> bool:
        """Whether a rank ends its training within so many seconds."""
        end = time.monotonic() + seconds
        while not any("ends with" in line for line in list(self.lines)):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for reader in self._readers:
            reader.join()

    def end(self) -> list[str]:
        """What the ranks have ended with."""
        codes = [agent.wait(patience(SECONDS)) for agent in self.agents]
        for reader in self._readers:
            reader.join()
        assert {code for code in codes if code != -signal.SIGKILL} == {0}, self.lines
        return sorted(line.partition("ends with")[2] for line in self.lines if "ends with" in line)


def commands(net: TwoHosts | None, script: list[str]) -> list[list[str]]:
    """One for each host."""
    if net is None:
        return [[*RUN, "--heal", *script]]
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
    return [host.inside([*RUN, "--heal", *meet, *script]) for host in net.hosts]


def disturb(job: Job, net: TwoHosts | None, kind: str, numbers: random.Random) -> float:
    """Bring a fault, and wait until it is healed; for how many seconds a link was cut."""
    cut, healed = 0.0, sum("; healed: " in line for line in list(job.lines))
    if kind == "link":
        assert net is not None
        begun = time.monotonic()
        net.cut(silently=True)
        time.sleep(numbers.uniform(1.0, 5.0))
        net.mend()
        cut = time.monotonic() - begun
    elif kind == "agent":
        job.agents[-1].kill()
        job.start(job.commands[-1])
    else:
        size = 2 * len(job.commands)
        os.kill(job.pid_of(numbers.randrange(size)), signal.Signals[kind])
    job.wait_for("; healed: ", healed + 1)
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults (15)")
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second, about (100)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("script", nargs="*", default=JOB, help="prints as the default does, and takes --steps")
    args = parser.parse_args()
    numbers = random.Random(args.seed)
    script = [*args.script, "--steps", str(int(60 * args.minutes * args.rate))]
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(two_hosts()) if args.hosts == 2 else None
        lines = commands(net, script)
        seconds, ends = [], []
        count, cut = 0, 0.0
        for heal in (False, True):
            job = Job(*([word for word in line if heal or word != "--heal"] for line in lines))
            stack.callback(job.kill)
            job.wait_for(r"step \d+$")
            begun = time.monotonic()
            if heal:
                for agent in range(args.hosts):
                    job.fork_server(agent)
            while heal and not job.finished(args.every):
                cut += disturb(job, net, args.kinds[count % len(args.kinds)], numbers)
                count += 1
            ends.append(job.end())
            seconds.append(time.monotonic() - begun)
    times = [float(line[1]) for line in job.wait_for(r"was done after ([\d.]+) s")]
    goodput = seconds[0] / (seconds[1] - cut)
    print(
        f"{count} faults, {args.hosts} x 2 ranks: {seconds[0]:.0f} s undisturbed, {seconds[1] - cut:.0f} s with faults"
    )
    print(f"goodput {goodput:.1%}; to the first new step {statistics.median(times):.2f} s, at most {max(times):.2f} s")
    print("the same digests" if ends[0] == ends[1] else f"DIFFERENT DIGESTS: {ends}")


if __name__ == "__main__":
    main()
