"""A language model on hosts that vanish and come back: work done and lost, pauses, and loss, by distopt and its peers.

Every so many seconds a host is killed (SIGKILL to all its processes), frozen (SIGSTOP) or cut off, and a few seconds
later it is back: started anew, thawed, or reconnected. A seed chooses which and how. Hosts are network namespaces of
this machine, with the same share of its cores each; one process on each trains `tiny` of examples/pytorch/language.
The host where all meet stays, since torchrun and torchft cannot lose theirs; `--any-host` for distopt alone.

A step is lost if it is done again, or if its host is lost before the steps since the last average have been averaged; its
samples count once. A pause is the longest time without a new step after a fault, at the survivor that waits longest. The
loss is the last one, less that of the undisturbed job after as many samples.

Needs root. torchft runs in an environment of its own, which is made once.

    sudo .venv/bin/python -m benchmarks churn
    sudo .venv/bin/python -m benchmarks churn --far --delay 40 --rate 20 --only diloco,torchft-diloco
"""

from __future__ import annotations

import argparse
import bisect
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from distopt.cli.values import at_least, positive
from distopt.errors import DistoptError

from .networks.emulation import LINK, Host, near_hosts
from .networks.far import add_link, far_hosts, link_of, number_of_hosts
from .networks.quota import share_of_cores
from .options import names_of
from .output import ROOT, heading, machine, put, table
from .peers.environments import ENVIRONMENTS

SCRIPT = str(Path(__file__).parent / "peers" / "ranks" / "churn.py")
MARK = "churn:"
BATCH = 8  # samples of a process in a step
TOGETHER = "all"  # the name of a step that all processes make together
PORT = 29_531
_START_SECONDS = 120.0
FAULTS = ("kill", "freeze", "cut")
WAYS = {
    "ddp": "DDP, distopt run --heal",
    "gloo": "DDP over Gloo, torchrun --max-restarts, a file every 50 steps",
    "torchft-ddp": "DDP, torchft over Gloo",
    "diloco": "DiLoCo, distopt run --workers node",
    "torchft-diloco": "DiLoCo, torchft over Gloo",
}


class Log:
    """The output of the processes of a job.

    Attributes:
        lines: the time of each line with the mark, and its words after it.
        other: the last lines of other output.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[float, list[str]]] = []
        self.other: list[str] = []

    def take(self, line: str) -> None:
        """A line of output."""
        if words := line.partition(MARK)[2].split():
            self.lines.append((time.monotonic(), words))
        else:
            self.other[:] = [*self.other[-40:], line.rstrip()]


class Job:
    """One way to train, on all hosts.

    Args:
        way: one of `WAYS`.
        hosts: the hosts.
        tasks: the file of each host that puts a process under its limits.
        folder: for the files of those ways that need some.
    """

    def __init__(self, way: str, hosts: Sequence[Host], tasks: Sequence[Path], folder: Path) -> None:
        self.way, self.hosts, self.log = way, hosts, Log()
        self._tasks, self._folder, self._started = tasks, folder, list[subprocess.Popen[str]]()
        if way.startswith("torchft"):
            ENVIRONMENTS["torchft"].prepare()
            words = [ENVIRONMENTS["torchft"].program("torchft_lighthouse"), "--min_replicas", "1"]
            self._run(0, [*words, "--join_timeout_ms", "1000", "--bind", f"{hosts[0].address}:{PORT}"], limits=False)
            time.sleep(1.0)
        for number in range(len(hosts)):
            self.start(number)
            if number == 0:
                time.sleep(1.0)  # the first one owns the endpoint

    def start(self, number: int) -> None:
        """Start the processes of a host."""
        host, last = self.hosts[number], len(self.hosts)
        env = {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        env["CHURN_HOST"] = str(number)
        meet = ["--nnodes", f"1:{last}", "--nproc-per-node", "1"]
        meet += ["--rdzv-endpoint", f"{self.hosts[0].address}:{PORT}"]
        if self.way.startswith("torchft"):
            env |= {"TORCHFT_LIGHTHOUSE": f"http://{self.hosts[0].address}:{PORT}"}
            env |= {"MASTER_PORT": str(PORT + 1), "HOST_ADDRESS": host.address}
            words = [ENVIRONMENTS["torchft"].program("python"), SCRIPT, self.way, "-"]
        elif self.way == "gloo":
            own = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}", "--rdzv-id", "churn"]
            words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000", *meet, *own]
            words += ["--rdzv-backend", "c10d", SCRIPT, self.way, str(self._folder)]
        else:
            workers = ["--workers", "node"] if self.way == "diloco" else []
            words = [sys.executable, "-m", "distopt", "run", "--heal", *workers, *meet, SCRIPT, self.way, "-"]
        self._run(number, ["env", *(f"{name}={value}" for name, value in env.items()), *words])

    def _run(self, number: int, words: list[str], *, limits: bool = True) -> None:
        words = self.hosts[number].inside(words)
        if limits:
            words = ["sh", "-c", f'echo $$ > {self._tasks[number]} && exec "$@"', "sh", *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace")
        self._started.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self.log.take(line)

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to all processes of a host that train or supervise."""
        for pid in self._tasks[number].read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signum)

    def close(self) -> None:
        """Kill all processes."""
        for _ in range(10):  # some may just start others
            for number in range(len(self.hosts)):
                self.signal(number, signal.SIGKILL)
            time.sleep(0.02)
        for process in self._started:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Fault:
    """A host that was lost at `begin`."""

    kind: str
    host: int
    begin: float


class Outcome:
    """Of a run, from `begin` to `end`.

    Attributes:
        samples: that have been trained, and not lost.
        lost: samples.
        pauses: seconds, for each fault; of an undisturbed run the longest one.
        losses: samples and loss, in the order of the samples.
        curve: seconds and samples so far.
    """

    def __init__(self, log: Log, faults: Sequence[Fault], begin: float, end: float) -> None:
        self.samples = self.lost = 0
        self.losses: list[tuple[int, float]] = []
        self.curve: list[tuple[float, int]] = []
        pending: dict[str, int] = {}  # samples since the last average, by process
        reached: dict[str, int] = {}
        new: dict[str, list[float]] = {}  # times of new steps
        for at, (what, *words) in [line for line in log.lines if line[0] <= end]:
            self.curve.append((at - begin, self.samples + sum(pending.values())))
            name = words[0]
            if what == "loss":
                self.losses.append((self.samples + sum(pending.values()), float(name)))
            elif what == "average":
                self.samples += pending.pop(name, 0)
            elif what in ("began", "lost"):
                self.lost += pending.pop(name, 0)
            else:
                step, samples = int(words[1]), int(words[2])
                if name == TOGETHER and step <= reached.get(name, 0):
                    self.lost += samples
                    continue
                reached[name] = step
                new.setdefault(name, []).append(at)
                if name == TOGETHER:
                    self.samples += samples
                else:
                    pending[name] = pending.get(name, 0) + samples
        self.samples += sum(pending.values())
        if faults:
            ends = [*(fault.begin for fault in faults[1:]), end]
            lost = zip(faults, ends, strict=True)
            self.pauses = [_pause(new, fault.begin, until, str(fault.host)) for fault, until in lost]
        else:
            self.pauses = [_pause(new, begin, end, "")]

    def loss_at(self, samples: int) -> float:
        """Between two known ones, by a line; none without two."""
        known = self.losses
        if len(known) < 2:
            return float("nan")
        i = min(max(bisect.bisect([at for at, _ in known], samples), 1), len(known) - 1)
        (x, first), (y, second) = known[i - 1], known[i]
        return first + (second - first) * (samples - x) / max(1, y - x)


def _pause(new: dict[str, list[float]], begin: float, end: float, victim: str) -> float:
    """The longest time without a new step that ends after `begin`, of those that are not the victim."""
    longest = 0.0
    for name, times in new.items():
        if name != victim:
            seen = [at for at in times if at < end]
            seen = [*(at for at in seen if at <= begin)][-1:] + [at for at in seen if at > begin] + [end]
            longest = max([longest, *(later - at for at, later in pairwise(seen))])
    return longest


def disturb(job: Job, args: argparse.Namespace) -> Iterator[Fault]:
    """Bring faults until the time is over, and wait in between."""
    numbers = random.Random(args.seed)
    end = time.monotonic() + args.seconds
    while (begin := time.monotonic() + args.every) + args.away < end:
        time.sleep(args.every)
        kind, host = numbers.choice(args.kinds), numbers.randrange(0 if args.any_host else 1, len(job.hosts))
        begin = time.monotonic()
        if kind == "cut":
            for other in job.hosts:
                _separate(job.hosts[host], other, silently=not args.far)
        else:
            job.signal(host, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        time.sleep(args.away)
        if kind == "cut":
            for other in job.hosts:
                other.mend()
        elif kind == "kill":
            job.start(host)
        else:
            job.signal(host, signal.SIGCONT)
        yield Fault(kind, host, begin)
    time.sleep(max(0.0, end - time.monotonic()))


def _separate(one: Host, other: Host, *, silently: bool) -> None:
    """Let nothing pass between two hosts."""
    if one is not other:
        one.cut(other, silently=silently)
        if silently:
            other.cut(one, silently=True)


@contextmanager
def _hosts(args: argparse.Namespace) -> Iterator[Sequence[Host]]:
    with far_hosts(args.hosts, link_of(args)) if args.far else near_hosts(args.hosts) as hosts:
        yield hosts


def run_way(way: str, args: argparse.Namespace, *, disturbed: bool) -> Outcome:
    """Train for some time.

    Raises:
        DistoptError: it makes no step.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(_hosts(args))
        cores = args.cores or len(os.sched_getaffinity(0)) * 0.9 / args.hosts
        tasks = [stack.enter_context(share_of_cores(host.namespace, cores)) for host in hosts]
        job = Job(way, hosts, tasks, folder)
        stack.callback(job.close)
        limit = time.monotonic() + _START_SECONDS
        while not any(words[0] == "step" for _, words in job.log.lines):
            if time.monotonic() > limit:
                raise DistoptError(
                    f"no step within {_START_SECONDS:g} s; the last output:\n" + "\n".join(job.log.other)
                )
            time.sleep(0.1)
        begin = time.monotonic()
        faults = list(disturb(job, args)) if disturbed else []
        time.sleep(max(0.0, begin + args.seconds - time.monotonic()))
        outcome = Outcome(job.log, faults, begin, time.monotonic())
        if args.verbose:
            print("\n".join(f"# {way}: {line}" for line in job.log.other), flush=True)
        return outcome


def plot(path: Path, outcomes: dict[str, tuple[Outcome, Outcome]], unit: int) -> None:
    """Draw the steps so far of each way over the seconds, the undisturbed run dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel="steps that count")
    for number, (way, pair) in enumerate(outcomes.items()):
        for outcome, style, label in zip(pair, ("--", "-"), (None, WAYS[way]), strict=True):
            seconds, samples = zip(*outcome.curve, strict=True)
            axes.plot(seconds, [each / unit for each in samples], style, color=f"C{number}", label=label)
    axes.set_xlim(0)
    axes.legend()
    figure.savefig(path, dpi=120)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=names_of(WAYS), default=list(WAYS), help=f"({','.join(WAYS)})")
    parser.add_argument("--hosts", type=number_of_hosts, default=4, metavar="H", help="(4)")
    parser.add_argument("--seconds", type=positive, default=240.0, metavar="S", help="of training in each run (240)")
    parser.add_argument("--every", type=positive, default=20.0, metavar="S", help="until the next fault (20)")
    parser.add_argument("--away", type=positive, default=10.0, metavar="S", help="until a host is back (10)")
    parser.add_argument("--kinds", type=names_of(FAULTS), default=list(FAULTS), help=f"({','.join(FAULTS)})")
    parser.add_argument("--any-host", action="store_true", help="lose the one where all meet, too")
    parser.add_argument("--seed", type=at_least(0), default=1, help="of the faults (1)")
    parser.add_argument("--cores", type=positive, help="of each host (nine tenths of this machine's, shared)")
    parser.add_argument("--far", action="store_true", help="hosts far apart, see the next three")
    add_link(parser)
    parser.add_argument("--verbose", action="store_true", help="print the last output of each job")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps over the seconds, by Matplotlib")
    parser.add_argument(
        "--output", type=Path, metavar="PAGE", help="write the table between the marks of this page, too"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a job made no step."""
    facts = machine()
    conditions = f"{args.hosts} hosts" + (f", {link_of(args)}" if args.far else "")
    conditions += (
        f"; {args.seconds:g} s a run, a fault {args.every:g} s after the last host is back, for {args.away:g} s"
    )
    print(f"# {heading(facts)}\n# {conditions}", flush=True)
    head = [
        "way",
        "steps, undisturbed",
        "disturbed",
        "of them",
        "lost",
        "pause, undisturbed",
        "median",
        "most",
        "loss, more",
    ]
    print(table(head, []), flush=True)
    rows: list[list[str]] = []
    outcomes: dict[str, tuple[Outcome, Outcome]] = {}
    unit, failed = BATCH * args.hosts, 0
    for way in args.only:
        try:
            plain, found = (run_way(way, args, disturbed=disturbed) for disturbed in (False, True))
        except DistoptError as error:
            print(f"# {WAYS[way]}: {error}", flush=True)
            failed = 1
            continue
        outcomes[way] = plain, found
        more = found.losses[-1][1] - plain.loss_at(found.losses[-1][0]) if found.losses else float("nan")
        cells = [f"{plain.samples / unit:.0f}", f"{found.samples / unit:.0f}", f"{found.samples / plain.samples:.0%}"]
        cells += [f"{found.lost / unit:.1f}", f"{plain.pauses[0]:.1f} s", f"{median(found.pauses):.1f} s"]
        rows.append([WAYS[way], *cells, f"{max(found.pauses):.1f} s", f"{more:+.3f}"])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    if args.output and not failed:
        text = f"{facts['cores']} cores of {facts['processor']}, Linux {facts['kernel']}. {conditions}."
        put(args.output, "churn", f"{text}\n\n{table(head, rows)}")
    if args.plot and outcomes:
        plot(args.plot, outcomes, unit)
    return failed
