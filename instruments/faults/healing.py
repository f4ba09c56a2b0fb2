"""Faults at a job that heals, again and again: how much of its time counts, and how many steps are lost.

    .venv/bin/python -m instruments.faults.healing --minutes 10 --every 15
    sudo .venv/bin/python -m instruments.faults.healing --hosts 2 --kinds SIGKILL,SIGSTOP,link,agent,owner -- SCRIPT
    sudo .venv/bin/python -m instruments.faults.healing --hosts 4 --ranks 1 --kinds node,frozen,cut --faults 30

Runs a job (default: `instruments.faults.healed`) twice, undisturbed and without --heal, and with a fault every so many
seconds, and compares the digests with which they end. Hosts are network namespaces, and need root.

With `--faults N`, that many faults follow soon after another, each when all processes that fork ranks are ready again;
then the job ends without pauses, and the undisturbed one runs. It fails if the job ends before. The script takes
`--until`, too.

Otherwise the speeds of the two are compared. By default both run at the same time, so that others' work slows both; but
where they share cores, each has half of them, and meets twice as many faults for its work as it would alone. With
`--apart`, an undisturbed job of so many minutes runs first, and an undisturbed one of as many steps and without their
pauses (`--pause 0`) last.

The kinds of faults are names of signals to a random rank, and

- all: SIGKILL to all ranks of a host,
- twice: SIGKILL to a rank, then to one of those that start again,
- server: SIGKILL to the process that forks ranks, and to a rank,
- link: the link of the last host is cut for 1 to 5 s, which do not count,
- agent, owner: SIGKILL to the agent of the last host, or to that which owns the endpoint; it is started again,
- node, frozen, cut: SIGKILL to all processes of a host, SIGSTOP to them, or its link is cut. When the job has gone on
  without it (--nnodes 1:N, the default with these kinds), the agent is started again, gets SIGCONT, or the link
  is mended; the node's return is a second healing. With `--nnodes N`, that happens when the job waits for the node. It
  is any of three or more nodes with --nnodes 1:N, else any but the first.

For each kind it prints a table of the seconds to the first new step and of the steps lost, as the job states them,
beside the number of steps that were printed more than once; and the memory that agents held at most. The exit code is 1
if the digests differ, or if a healing has lost more steps than `--most-lost`. Digests of a job without shards whose
number of nodes changes are not those of an undisturbed one: `--no-digests`.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.networks.emulation import LINK, Host, near_hosts, wait_for_link
from tests.processes import LIMIT_SECONDS, ROOT

from .held import held_by

RUN = [sys.executable, "-W", "ignore", "-m", "distopt", "run", "--nproc-per-node", "2"]
JOB = ["-m", "instruments.faults.healed"]
PORT = 29_484
_LOSSES = ("node", "frozen", "cut")


def children_of(agent: int, kind: str = "", *, without: Sequence[int] = ()) -> list[int]:
    """As `Job.children` of the agent with this pid, without a wait. Those of a supervisor of workers are agents."""
    found = []
    for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            first, _, last = Path(f"/proc/{child}/comm").read_text().strip().partition(" ")
            fits = (last if first == "distopt" else "") == kind
            if command and b"orphans" not in command and fits and child not in without:
                found.append(child)
    return found


class Job:
    """Agents of a job, one for each command, and all that they print; the others start `after` the first is ready."""

    def __init__(self, *commands: list[str], after: Callable[[], bool] = lambda: True, log: Path | None = None) -> None:
        self.commands = commands
        self._log = log.open("w", buffering=1) if log is not None else None
        self.lines: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="distopt-job-")  # no agent finds what one of another job has remembered
        self._created, self._begun = time.monotonic(), 0.0
        self._readers: list[threading.Thread] = []
        self.agents = [self._start(commands[0])]
        while not after():
            time.sleep(0.01)
        self.agents += [self._start(command) for command in commands[1:]]

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes."""
        return any(word.startswith("1:") for word in self.commands[0])

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
                if self._log is not None:
                    self._log.write(f"{time.monotonic() - self._created:.3f} {line}")
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
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            if found := children_of(self.agents[agent].pid, kind, without=without):
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


def commands(
    hosts: Sequence[Host], script: list[str], nodes: str = "", *, n_ranks: int = 2, heals: bool = True
) -> list[list[str]]:
    """One for each host; without any, one for this."""
    run = [*RUN[:-1], str(n_ranks), *(["--heal"] if heals else [])]
    if not hosts:
        return [[*run, *script]]
    meet = ["--nnodes", nodes or str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"]
    return [host.inside([*run, *meet, *script]) for host in hosts]


def without_heal(commands: Sequence[list[str]]) -> list[list[str]]:
    return [[word for word in command if word != "--heal"] for command in commands]


def costs(job: Job) -> list[tuple[str, float, int]]:
    """Of each healing: its line, the seconds to the first new step, and the steps lost."""
    found = [re.search(r"; healed: .* after ([\d.]+) s \(.*: (\d+) steps? lost", line) for line in list(job.lines)]
    return [(line.string, float(line[1]), int(line[2])) for line in found if line]


def cut(hosts: Sequence[Host], number: int) -> Callable[[], None]:
    """Cut a host off from the others; the function that undoes it."""
    for other in hosts:
        if other is not hosts[number]:
            hosts[number].cut(other, silently=True)
            other.cut(hosts[number], silently=True)

    def mend() -> None:
        for host in hosts:
            host.mend()
        wait_for_link(hosts)

    return mend


def signal_all(job: Job, number: int, signum: signal.Signals) -> list[int]:
    """Send a signal to an agent and all its processes at once, as a machine is lost; their pids."""
    agent = job.agents[number].pid
    pids = [agent, *map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the agent has killed it
            os.kill(pid, signum)
    return pids


def freeze(job: Job, number: int) -> Callable[[], None]:
    """Stop an agent and all its processes; the function that has them go on."""
    pids = signal_all(job, number, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return go_on


def lose(job: Job, hosts: Sequence[Host], kind: str, number: int) -> None:
    """Have a node be lost and come back, and wait until both are healed."""

    def count(text: str) -> int:
        return sum(text in line for line in list(job.lines))

    ends = "; healed: " if job.is_elastic else "waiting for it"
    before, healed, came = count(ends), count("; healed: "), count(" has come; ")
    if kind == "frozen":
        give_back = freeze(job, number)
    elif kind == "cut":
        give_back = cut(hosts, number)
    else:
        signal_all(job, number, signal.SIGKILL)
        job.kill_agent(number)
        give_back = partial(job.start_agent, number)
    job.wait_for(ends, before + 1)
    if job.is_elastic:
        job.more_steps()
        give_back()
        job.wait_for(" has come; ", came + 1)
        job.more_steps()
    else:
        give_back()
        job.wait_for("; healed: ", healed + 1)


def disturb(job: Job, hosts: Sequence[Host], kind: str, numbers: random.Random) -> float:
    """Bring a fault, and wait until it is healed; for how many seconds a link was cut."""
    seconds, healed = 0.0, sum("; healed: " in line for line in list(job.lines))
    if kind in _LOSSES:
        any_host = job.is_elastic and len(hosts) > 2
        lose(job, hosts, kind, numbers.randrange(0 if any_host else 1, len(hosts)))
        return 0.0
    if kind == "link":
        begun = time.monotonic()
        mend = cut(hosts, len(hosts) - 1)
        time.sleep(numbers.uniform(1.0, 5.0))
        mend()
        seconds = time.monotonic() - begun
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
    return seconds


class Record:
    """The healings of a job, by the kind of the fault, and the memory that its agents have held at most."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = 0
        self.cut = 0.0  # seconds
        self._of_kinds: dict[str, list[tuple[str, float, int]]] = {}
        self._held = held_by([])

    def disturb(self, hosts: Sequence[Host], kind: str, numbers: random.Random) -> None:
        """Bring a fault; see `disturb`."""
        known = len(costs(self.job))
        self._held = self._held.at_most(held_by([agent.pid for agent in self.job.agents]))
        self.cut += disturb(self.job, hosts, kind, numbers)
        self.count += 1
        for cost in costs(self.job)[known:]:
            name = f"{kind}, return" if kind in _LOSSES and " has come; " in cost[0] else kind
            self._of_kinds.setdefault(name, []).append(cost)
            print(f"{kind}: {cost[0]}", file=sys.stderr, flush=True)

    @property
    def most_lost(self) -> int:
        """Steps that a healing has lost at most."""
        return max((lost for each in self._of_kinds.values() for _, _, lost in each), default=0)

    def lines(self) -> Iterator[str]:
        """The table, and what follows it."""
        yield "| fault | healings | to the first new step: median, most | none lost | one | more |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for kind, healings in self._of_kinds.items():
            times, lost = [each[1] for each in healings], [each[2] for each in healings]
            counts = f"{lost.count(0)} | {lost.count(1)} | {sum(each > 1 for each in lost)}"
            yield f"| {kind} | {len(lost)} | {statistics.median(times):.2f} s, {max(times):.2f} s | {counts} |"
        printed = [line for line in self.job.lines if re.fullmatch(r"step \d+", line)]
        lost_steps = sum(lost for each in self._of_kinds.values() for _, _, lost in each)
        yield f"{lost_steps} steps lost, {len(printed) - len(set(printed))} printed more than once"
        yield f"an agent held at most {self._held}"


def one_after_another(record: Record, hosts: Sequence[Host], args: argparse.Namespace) -> None:
    """Bring `--faults`."""
    numbers, job = random.Random(args.seed), record.job
    while record.count < args.faults:
        for agent in range(len(job.agents)):
            job.children(agent, "spare")
        if job.finished(args.every + numbers.uniform(0.0, 1.0)):
            break
        record.disturb(hosts, args.kinds[record.count % len(args.kinds)], numbers)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="on each host (2)")
    parser.add_argument("--nnodes", help="the option of distopt run")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--faults", type=int, help="so many, soon after another")
    parser.add_argument("--steps", type=int, help="with --faults (40 for each)")
    parser.add_argument("--most-lost", type=int, default=sys.maxsize, help="steps that a healing may lose")
    parser.add_argument("--no-digests", dest="digests", action="store_false", help="run no undisturbed job")
    parser.add_argument("--log", type=Path, help="a file for all that the job prints")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, help="seconds between two faults (15; with --faults 1)")
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second, about (100)")
    parser.add_argument(
        "--apart", type=float, metavar="MINUTES", help="for which the undisturbed job runs first, alone"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "script", nargs="*", default=JOB, help="prints as the default does, and takes --steps and --pause"
    )
    args = parser.parse_args()
    if args.every is None:
        args.every = 1.0 if args.faults else 15.0
    if args.nnodes is None and set(_LOSSES) & set(args.kinds):
        args.nnodes = f"1:{args.hosts}"
    return args


class Site:
    """Starts jobs on emulated hosts, on others without --heal."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._args, self._stack = args, stack
        several = args.hosts > 1
        self.hosts, self._others = (
            stack.enter_context(near_hosts(args.hosts, mark)) if several else () for mark in ("", "u")
        )

    def start(self, script: list[str], *, heals: bool) -> Job:
        hosts, nodes = (self.hosts, self._args.nnodes) if heals else (self._others, "")
        log = self._args.log if heals else None
        job = Job(*commands(hosts, script, nodes or "", n_ranks=self._args.ranks, heals=heals), log=log)
        self._stack.callback(job.kill)
        return job

    def ends_of(self, job: Job) -> list[str]:
        while not job.finished(self._args.every):
            pass
        return job.end()


def compared(record: Record, undisturbed: list[str] | None, ends: list[str], args: argparse.Namespace) -> int:
    """Print what has come out; the exit code."""
    for line in record.lines():
        print(line)
    same = undisturbed is None or set(ends) == set(undisturbed)
    if undisturbed is not None:
        print("the same digests" if same else f"DIFFERENT DIGESTS: {undisturbed, ends}")
    if (most := record.most_lost) > args.most_lost:
        print(f"{most} STEPS LOST")
    return int(not same or most > args.most_lost)


def count_lost_steps(args: argparse.Namespace) -> int:
    """So many faults, soon after another."""
    script = [*args.script, "--steps", str(args.steps or 40 * args.faults)]
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        until = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "until"
        site = Site(args, stack)
        record = Record(site.start([*script, "--until", str(until)], heals=True))
        record.job.more_steps()
        one_after_another(record, site.hosts, args)
        seconds = time.monotonic() - begun
        until.touch()
        ends = record.job.end()
        undisturbed = site.ends_of(site.start([*script, "--pause", "0"], heals=False)) if args.digests else None
    print(f"{record.count} faults, {args.hosts} x {args.ranks} ranks, in {seconds:.0f} s")
    code = compared(record, undisturbed, ends, args)
    if record.count < args.faults:
        print(f"THE JOB HAS ENDED BEFORE FAULT {record.count + 1} of {args.faults}; give more --steps")
    return code or int(record.count < args.faults)


def count_time(args: argparse.Namespace) -> int:
    """A fault every so many seconds, beside an undisturbed job."""
    numbers = random.Random(args.seed)
    script = [*args.script, "--steps", str(steps := int(60 * args.minutes * args.rate))]
    with contextlib.ExitStack() as stack:
        site = Site(args, stack)
        if args.apart:
            some = int(60 * args.apart * args.rate)
            undisturbed = site.start([*args.script, "--steps", str(some)], heals=False)
            site.ends_of(undisturbed)
            speed = (some - 1) / undisturbed.seconds
        else:
            undisturbed = site.start(script, heals=False)
        job = site.start(script, heals=True)
        for agent in range(args.hosts):
            job.fork_server(agent)
        record = Record(job)
        while not job.finished(args.every):
            record.disturb(site.hosts, args.kinds[record.count % len(args.kinds)], numbers)
        if args.apart:
            undisturbed = site.start([*script, "--pause", "0"], heals=False)
        ends = site.ends_of(undisturbed), job.end()
        if not args.apart:
            speed = (steps - 1) / undisturbed.seconds
    seconds = job.seconds - record.cut
    print(
        f"{record.count} faults in {seconds:.0f} s, {args.hosts} x {args.ranks} ranks: "
        f"{(steps - 1) / seconds:.1f} steps a second"
    )
    print(f"undisturbed: {speed:.1f}")
    print(f"goodput {(steps - 1) / seconds / speed:.1%}")
    return compared(record, ends[0] if args.digests else None, ends[1], args)


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that agents and hosts end, too
    return count_lost_steps(args) if args.faults else count_time(args)


if __name__ == "__main__":
    sys.exit(main())
