"""A language model on hosts that vanish and come back: work done and lost, pauses, and loss, by distopt and its peers.

Every so many seconds a host is killed (SIGKILL to all its processes), frozen (SIGSTOP) or cut off, and a few seconds
later it is back: started anew, thawed, or reconnected. A seed chooses which and how. Hosts are network namespaces of
this machine, with the same share of its cores each; one process on each trains `tiny` of examples/pytorch/language.
The host where all meet stays, since torchrun and torchft cannot lose theirs; `--any-host` for distopt alone.

A step is lost if it is done again, or if its host is lost before the steps since the last average have been averaged; its
samples count once. A pause is the longest time without a new step after a fault, at the survivor that waits longest. The
loss is the last one, less that of the undisturbed job after as many samples.

For distopt's DiLoCo, lines below its row say what must hold: that no worker's steps go back, and how long the others
stand still; that all workers have the same bits after each average, also those that join with it; goodput, which is the
share of the time of all workers that are not lost in which they compute or are inside an average that counts; and the
loss after as many averaged samples, of all seeds.

Needs root. torchft runs in an environment of its own, which is made once.

    sudo .venv/bin/python -m benchmarks churn
    sudo .venv/bin/python -m benchmarks churn --far --delay 40 --rate 20 --only diloco,torchft-diloco
    sudo .venv/bin/python -m benchmarks churn --far --delay 40 --rate 20 --only diloco,diloco-top-k --any-host \
        --seconds 310 --seeds 1,2,3
"""

from __future__ import annotations

import argparse
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
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import mean, median

from distopt.cli.values import at_least, positive
from distopt.errors import DistoptError

from .networks.emulation import LINK, Host, near_hosts
from .networks.far import add_link, far_hosts, link_of, number_of_hosts
from .networks.quota import share_of_cores
from .options import names_of
from .output import ROOT, heading, machine, put, table
from .peers.churn_log import Fault, Log, Outcome, verdicts
from .peers.environments import ENVIRONMENTS

SCRIPT = str(Path(__file__).parent / "peers" / "ranks" / "churn.py")
BATCH = 8  # samples of a process in a step
PORT = 29_531
_START_SECONDS = 120.0
_LOSS = 0.01  # how much the loss may differ
FAULTS = ("kill", "freeze", "cut")
WAYS = {
    "ddp": "DDP, distopt run --heal",
    "gloo": "DDP over Gloo, torchrun --max-restarts, a file every 50 steps",
    "torchft-ddp": "DDP, torchft over Gloo",
    "diloco": "DiLoCo, distopt run --workers node",
    "diloco-top-k": "DiLoCo, distopt run --workers node, top-K 5 %",
    "sparse-loco": "SparseLoCo, distopt run --workers node",
    "torchft-diloco": "DiLoCo, torchft over Gloo",
}
_WITH_WORKERS = ("diloco", "diloco-top-k", "sparse-loco")


class Job:
    """One way to train, on all hosts.

    Args:
        way: one of `WAYS`.
        hosts: the hosts.
        tasks: the file of each host that puts a process under its limits.
        folder: for the files of those ways that need some.
        options: variables of the script.
    """

    def __init__(
        self, way: str, hosts: Sequence[Host], tasks: Sequence[Path], folder: Path, options: dict[str, str]
    ) -> None:
        self.way, self.hosts, self.log, self._options = way, hosts, Log(), options
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
        own = self._folder / host.name  # hosts share no files, such as what agents remember of an earlier job
        own.mkdir(exist_ok=True)
        env |= {"CHURN_HOST": str(number), "TMPDIR": str(own), **self._options}
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
            workers = ["--workers", "node"] if self.way in _WITH_WORKERS else []
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


def disturb(job: Job, args: argparse.Namespace, seed: int) -> Iterator[Fault]:
    """Bring faults until the time is over, and wait in between."""
    numbers = random.Random(seed)
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
        yield Fault(kind, host, begin, time.monotonic())
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


def run_way(way: str, args: argparse.Namespace, seed: int, *, disturbed: bool) -> Outcome:
    """Train for some time.

    Raises:
        DistoptError: it makes no step.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(_hosts(args))
        cores = args.cores or len(os.sched_getaffinity(0)) * 0.9 / args.hosts
        tasks = [stack.enter_context(share_of_cores(host.namespace, cores)) for host in hosts]
        options = {"CHURN_SEED": str(seed), "CHURN_SYNC_EVERY": str(args.sync_every)}
        job = Job(way, hosts, tasks, folder, options)
        stack.callback(job.close)
        limit = time.monotonic() + _START_SECONDS
        while not any(words[0] == "step" for _, words in job.log.lines):
            if time.monotonic() > limit:
                raise DistoptError(
                    f"no step within {_START_SECONDS:g} s; the last output:\n" + "\n".join(job.log.other)
                )
            time.sleep(0.1)
        begin = time.monotonic()
        faults = list(disturb(job, args, seed)) if disturbed else []
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


def _seeds(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=names_of(WAYS), default=list(WAYS), help=f"({','.join(WAYS)})")
    parser.add_argument("--hosts", type=number_of_hosts, default=4, metavar="H", help="(4)")
    parser.add_argument("--seconds", type=positive, default=240.0, metavar="S", help="of training in each run (240)")
    parser.add_argument("--every", type=positive, default=20.0, metavar="S", help="until the next fault (20)")
    parser.add_argument("--away", type=positive, default=10.0, metavar="S", help="until a host is back (10)")
    parser.add_argument("--kinds", type=names_of(FAULTS), default=list(FAULTS), help=f"({','.join(FAULTS)})")
    parser.add_argument("--sync-every", type=at_least(1), default=100, metavar="N", help="steps of DiLoCo (100)")
    parser.add_argument("--any-host", action="store_true", help="lose the one where all meet, too")
    parser.add_argument(
        "--seeds", type=_seeds, default=[1], help="of faults, parameters and samples; a run for each (1)"
    )
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
    relative: dict[str, list[float]] = {}
    for way, seed in product(args.only, args.seeds):
        try:
            plain, found = (run_way(way, args, seed, disturbed=disturbed) for disturbed in (False, True))
        except DistoptError as error:
            print(f"# {WAYS[way]}: {error}", flush=True)
            failed = 1
            continue
        outcomes[way] = plain, found
        same = plain.loss_at(found.losses[-1][0]) if found.losses else float("nan")
        more = found.losses[-1][1] - same if found.losses else float("nan")
        cells = [f"{plain.samples / unit:.0f}", f"{found.samples / unit:.0f}", f"{found.samples / plain.samples:.0%}"]
        cells += [f"{found.lost / unit:.1f}", f"{plain.pauses[0]:.1f} s", f"{median(found.pauses):.1f} s"]
        rows.append([WAYS[way], *cells, f"{max(found.pauses):.1f} s", f"{more:+.3f}" if isfinite(more) else "-"])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
        if way in _WITH_WORKERS:
            for line in verdicts(plain, found):
                print(f"# {line}", flush=True)
            differences = relative.setdefault(way, [])
            differences.append(more / same)
            text = (
                f"{mean(differences):+.2%} is the loss more at equal averaged samples, mean of {len(differences)} seeds"
            )
            print(f"# {'' if mean(differences) <= _LOSS else 'NOT '}{text}", flush=True)
    if args.output and not failed:
        text = f"{facts['cores']} cores of {facts['processor']}, Linux {facts['kernel']}. {conditions}."
        put(args.output, "churn", f"{text}\n\n{table(head, rows)}")
    if args.plot and outcomes:
        plot(args.plot, outcomes, unit)
    return failed
