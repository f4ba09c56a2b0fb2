"""Faults at a job that heals, again and again: how much of its time counts.

    .venv/bin/python -m tests.faults.healing --minutes 10 --every 15
    sudo .venv/bin/python -m tests.faults.healing --hosts 2 --kinds SIGKILL,SIGSTOP,link,agent,owner -- SCRIPT

Runs a job (default: `tests.ranks.healed`) twice, undisturbed and without --heal, and with a fault every so many
seconds, and compares their speeds and the digests with which they end. By default both run at the same time, so that
others' work slows both; but where they share cores, each has half of them, and meets twice as many faults for its work
as it would alone. With `--apart`, an undisturbed job of so many minutes runs first, and an undisturbed one of as many
steps and without their pauses (`--pause 0`) last. Two hosts are network namespaces, with two ranks each, and need
root. The kinds of faults are names of signals to a random rank, and

- all: SIGKILL to all ranks of a host,
- twice: SIGKILL to a rank, then to one of those that start again,
- server: SIGKILL to the process that forks ranks, and to a rank,
- link: the link between the hosts is cut for 1 to 5 s, which do not count,
- agent, owner: SIGKILL to the agent of the second host, or to that which owns the endpoint; it is started again,
- frozen: SIGSTOP to the agent of the second host and its ranks, and SIGCONT when the job has gone on without them
  (--nnodes 1:2),
- node: SIGKILL to the agent of the second host; the job goes on without it (--nnodes 1:2) and takes it in again, which
  is a second healing, with a cost of its own.

For each kind it prints the seconds to the first new step, and how many steps were lost, as the job states them. The
exit code is 1 if the digests differ; of jobs without shards and with the kind "node" they may.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.networks.emulation import LINK, TwoHosts, two_hosts
from tests.processes import LIMIT_SECONDS, ROOT

RUN = [sys.executable, "-W", "ignore", "-m", "distopt", "run", "--nproc-per-node", "2"]
JOB = ["-m", "tests.ranks.healed"]
PORT = 29_484


class Job:
    """Agents of a job, one for each command, and all that they print; the others start `after` the first is ready."""

    def __init__(self, *commands: list[str], after: Callable[[], bool] = lambda: True) -> None:
        self.commands = commands
        self.lines: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="distopt-job-")  # no agent finds what one of another job has remembered
        self._begun = 0.0
        self._readers: list[threading.Thread] = []
        self.agents = [self._start(commands[0])]
        while not after():
            time.sleep(0.01)
        self.agents += [self._start(command) for command in commands[1:]]

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["TMPDIR"] = self._folder
        env |= {"GLOO_SOCKET_IFNAME": LINK} if "netns" in command else {}
        agent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._readers.append(threading.Thread(target=self._read, args=(agent,), daemon=True))
        self._readers[-1].start()
        return agent

    def kill_agent(self, number: int) -> None:
        self.agents[number].kill()
        self.agents[number].wait()

    def start_agent(self, number: int) -> None:
        """Start another in its place."""
        self.agents[number] = self._start(self.commands[number])

    def _read(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        with agent.stdout:
            for line in agent.stdout:
                self.lines.append(line.rstrip("\n"))
                if not self._begun and line.startswith("step "):
                    self._begun = time.monotonic()
                if "ends with" in line:
                    self.seconds = time.monotonic() - self._begun  # from the first steps

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """All lines that the pattern matches, once there are so many."""
        end = time.monotonic() + LIMIT_SECONDS
        while len(found := [m for m in (re.search(pattern, line) for line in list(self.lines)) if m]) < count:
            assert time.monotonic() < end, self.lines
            assert any(agent.poll() is None for agent in self.agents), self.lines
            time.sleep(0.01)
        return found

    def more_steps(self) -> None:
        """Wait for two: a copy of the last step's states may still be under way, so that a fault loses it."""
        self.wait_for(r"^step \d+$", sum(line.startswith("step ") for line in list(self.lines)) + 2)

    def pid_of(self, rank: int) -> int:
        """Of its newest process."""
        return int(self.wait_for(rf"rank {rank} is (\d+)")[-1][1])

    def children(self, agent: int, kind: str = "", *, without: Sequence[int] = ()) -> list[int]:
        """Wait for the ranks of an agent, the process that "forks" them, or each "spare"; without those given."""
        pid, end = self.agents[agent].pid, time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            found = []
            for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
                with contextlib.suppress(OSError):  # it has ended
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    first, _, last = Path(f"/proc/{child}/comm").read_text().strip().partition(" ")
                    fits = (last if first == "distopt" else "") == kind
                    if command and b"orphans" not in command and fits and child not in without:
                        found.append(child)
            if found:
                return found
            time.sleep(0.01)
        raise AssertionError(self.lines)

    def fork_server(self, agent: int = 0, before: int = 0) -> int:
        """Wait for that of an agent, which is not the one `before`."""
        return self.children(agent, "forks", without=[before])[0]

    def finished(self, seconds: float) -> bool:
        """Whether a rank ends its training within so many seconds."""
        end = time.monotonic() + seconds
        while not any("ends with" in line for line in list(self.lines)):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def kill(self) -> None:
        for number in range(len(self.agents)):
            self.kill_agent(number)
        for reader in self._readers:
            reader.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> list[str]:
        """The ranks' final digests."""
        codes = [agent.wait(LIMIT_SECONDS) for agent in self.agents]
        for reader in self._readers:
            reader.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        assert not any(codes), self.lines
        return sorted(line.partition("ends with")[2] for line in self.lines if "ends with" in line)


def commands(net: TwoHosts | None, script: list[str], nodes: str = "2") -> list[list[str]]:
    """One for each host."""
    if net is None:
        return [[*RUN, "--heal", *script]]
    meet = ["--nnodes", nodes, "--rdzv-endpoint", f"{net.hosts[0].address}:{PORT}"]
    return [host.inside([*RUN, "--heal", *meet, *script]) for host in net.hosts]


def without_heal(commands: Sequence[list[str]]) -> list[list[str]]:
    return [[word for word in command if word != "--heal"] for command in commands]


def costs(job: Job) -> list[tuple[float, int]]:
    """Of each healing: the seconds to the first new step, and the steps lost."""
    found = [re.search(r"; healed: .* after ([\d.]+) s \(.*: (\d+) steps? lost", line) for line in list(job.lines)]
    return [(float(line[1]), int(line[2])) for line in found if line]


def disturb(job: Job, net: TwoHosts | None, kind: str, numbers: random.Random) -> float:
    """Bring a fault, and wait until it is healed; for how many seconds a link was cut."""
    cut, healed = 0.0, sum("; healed: " in line for line in list(job.lines))
    if kind == "node":
        job.kill_agent(1)
        job.wait_for("; healed: ", healed + 1)
        job.more_steps()
        job.start_agent(1)
        healed += 1
    elif kind == "frozen":
        pids = [job.agents[1].pid, *job.children(1)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job.wait_for("; healed: ", healed + 1)
        job.more_steps()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        healed += 1
    elif kind == "link":
        assert net is not None
        begun = time.monotonic()
        net.cut(silently=True)
        time.sleep(numbers.uniform(1.0, 5.0))
        net.mend()
        cut = time.monotonic() - begun
    elif kind in ("agent", "owner"):
        number = 0 if kind == "owner" else len(job.commands) - 1
        job.kill_agent(number)
        job.start_agent(number)
    else:
        agent = numbers.randrange(len(job.agents))
        ranks = job.children(agent)
        if kind == "server":
            os.kill(job.fork_server(agent), signal.SIGKILL)
        signum = signal.Signals[kind] if kind.startswith("SIG") else signal.SIGKILL
        for rank in ranks if kind == "all" else [numbers.choice(ranks)]:
            os.kill(rank, signum)
        if kind == "twice":
            again = job.children(numbers.randrange(len(job.agents)), without=ranks)
            time.sleep(numbers.uniform(0.0, 0.3))
            with contextlib.suppress(ProcessLookupError):
                os.kill(again[0], signal.SIGKILL)
    job.wait_for("; healed: ", healed + 1)
    return cut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults (15)")
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second, about (100)")
    parser.add_argument(
        "--apart", type=float, metavar="MINUTES", help="for which the undisturbed job runs first, alone"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "script", nargs="*", default=JOB, help="prints as the default does, and takes --steps and --pause"
    )
    args = parser.parse_args()
    numbers = random.Random(args.seed)
    script = [*args.script, "--steps", str(steps := int(60 * args.minutes * args.rate))]
    with contextlib.ExitStack() as stack:
        nets = [stack.enter_context(two_hosts(mark)) if args.hosts == 2 else None for mark in ("", "u")]

        def start(net: TwoHosts | None, script: list[str], *, heals: bool) -> Job:
            nodes = "1:2" if heals and {"node", "frozen"} & set(args.kinds) else "2"
            job = Job(*(commands(net, script, nodes) if heals else without_heal(commands(net, script))))
            stack.callback(job.kill)
            return job

        def ends_of(job: Job) -> list[str]:
            while not job.finished(args.every):
                pass
            return job.end()

        if args.apart:
            some = int(60 * args.apart * args.rate)
            undisturbed = start(nets[1], [*args.script, "--steps", str(some)], heals=False)
            ends_of(undisturbed)
            speed = (some - 1) / undisturbed.seconds
        else:
            undisturbed = start(nets[1], script, heals=False)
        job = start(nets[0], script, heals=True)
        for agent in range(args.hosts):
            job.fork_server(agent)
        count, cut = 0, 0.0
        of_kinds: dict[str, list[tuple[float, int]]] = {}
        while not job.finished(args.every):
            kind, known = args.kinds[count % len(args.kinds)], len(costs(job))
            cut += disturb(job, nets[0], kind, numbers)
            of_kinds.setdefault(kind, []).extend(costs(job)[known:])
            count += 1
        if args.apart:
            undisturbed = start(nets[1], [*script, "--pause", "0"], heals=False)
        ends = ends_of(undisturbed), job.end()
        if not args.apart:
            speed = (steps - 1) / undisturbed.seconds
    seconds = job.seconds - cut
    print(f"{count} faults in {seconds:.0f} s, {args.hosts} x 2 ranks: {(steps - 1) / seconds:.1f} steps a second")
    print(f"undisturbed: {speed:.1f}")
    print(f"goodput {(steps - 1) / seconds / speed:.1%}")
    for kind, healings in of_kinds.items():
        times, lost = zip(*healings, strict=True)
        print(
            f"{kind}: {len(times)} healings, to the first new step {statistics.median(times):.2f} s, at most "
            f"{max(times):.2f} s; steps lost {statistics.median(lost):g}, at most {max(lost)}"
        )
    print("the same digests" if ends[0] == ends[1] else f"DIFFERENT DIGESTS: {ends}")
    return int(ends[0] != ends[1])


if __name__ == "__main__":
    sys.exit(main())
