"""Faults of a training on two hosts: how soon all of it is gone, who is named, and what is left.

`python -m tests.faults.hosts --trials 20` makes two hosts, which are network namespaces of this machine (needs root),
starts a small training of two ranks on each, brings a fault to a random rank at a random moment, and prints a table.
Open MPI is measured in an environment that has it in place of MPICH.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from distopt.cli.bench.emulation import LINK, TwoHosts, two_hosts
from tests.processes import Program, is_open_mpi

from .cases import own_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS_PER_HOST = 2
SIZE = 2 * RANKS_PER_HOST
START_SECONDS = 60.0
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGSEGV": signal.SIGSEGV,
    "exception": signal.SIGUSR1,  # see tests.faults.hosts_job
    "os._exit": signal.SIGUSR2,
}
LINKS = ("link down", "packets lost")
FAULTS = (*SIGNALS, *LINKS)
PROMISED_SECONDS = {fault: 10.0 if fault in LINKS else 5.0 for fault in FAULTS}
GIVEN_UP_SECONDS = 30.0


@dataclass(frozen=True)
class Trial:
    """One fault. `rank` and `delay`, in seconds from the moment when all ranks train, are drawn at random."""

    launcher: str
    fault: str
    rank: int
    delay: float


@dataclass
class Outcome:
    """What became of it.

    Attributes:
        seconds: from the fault to the end of the last process.
        namings: lines that name the rank, with its host and process; after the loss of a link, one beyond it.
        left: files that remain in shared memory and in the folder for temporary files.
        codes: exit codes of the programs that started the ranks.
        output: all that they and the ranks have written.
    """

    trial: Trial
    seconds: float
    namings: list[str]
    left: list[str]
    codes: list[int]
    output: str

    def faults(self) -> list[str]:
        """What was promised and did not hold."""
        found = []
        promised = PROMISED_SECONDS[self.trial.fault]
        if self.seconds > promised:
            found.append(f"{self.seconds:.1f} s instead of {promised:g}")
        if not self.namings:
            found.append("the rank is not named")
        if self.left:
            found.append(f"left: {', '.join(self.left)}")
        if not all(self.codes):
            found.append(f"exit codes {self.codes}")
        return found


# -- launchers -------------------------------------------------------------------------------------------------------
def _by_mpiexec(net: TwoHosts, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    return [(net.mpiexec(RANKS_PER_HOST, command), {})]


def _numbered(
    net: TwoHosts, command: list[str], numbers: Callable[[int, int], dict[str, str]]
) -> list[tuple[list[str], dict[str, str]]]:
    """On each host a shell that starts the ranks with variables and waits for them."""
    wire = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
    programs = []
    for node, host in enumerate(net.hosts):
        lines = []
        for local in range(RANKS_PER_HOST):
            words = " ".join(f"{k}={v}" for k, v in numbers(node * RANKS_PER_HOST + local, local).items())
            lines.append(f'env {words} "$@" & pids="$pids $!"')
        lines.append("code=0; for pid in $pids; do wait $pid || code=$?; done; exit $code")
        programs.append((host.inside(["sh", "-c", "\n".join(lines), "node", *command]), wire))
    return programs


def _by_srun(net: TwoHosts, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    job = random.randrange(1 << 30)

    def numbers(rank: int, local: int) -> dict[str, str]:
        return {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(SIZE),
            "SLURM_LOCALID": str(local),
            "SLURM_JOB_ID": str(job),
            "SLURM_CLUSTER_NAME": "test",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": net.hosts[0].address,
            "SLURM_STEP_NUM_NODES": "2",
        }

    return _numbered(net, command, numbers)


def _by_hand(net: TwoHosts, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    port = random.randrange(1 << 15, 1 << 16)

    def numbers(rank: int, local: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
            "MASTER_ADDR": net.hosts[0].address,
            "MASTER_PORT": str(port),
        }

    return _numbered(net, command, numbers)


def _by_run(net: TwoHosts, command: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    endpoint = f"{net.hosts[0].address}:{random.randrange(1 << 14, 1 << 15)}"
    words = ["--nnodes", "2", "--nproc-per-node", str(RANKS_PER_HOST), "--rdzv-endpoint", endpoint, *command[1:]]
    wire = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
    return [(host.inside([command[0], "-m", "distopt", "run", *words]), wire) for host in net.hosts]


LAUNCHERS = {"mpiexec": _by_mpiexec, "srun": _by_srun, "by hand": _by_hand, "distopt run": _by_run}


# -- one trial -------------------------------------------------------------------------------------------------------
@dataclass
class _Job:
    programs: list[Program]
    told: Path
    ranks: dict[int, tuple[int, str]] = field(default_factory=dict)  # process and host, by rank

    def pids(self) -> dict[int, str]:
        return {pid: name for program in self.programs for pid, name in program.pids().items()}

    def wait_until_trains(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self.ranks) < SIZE:
            if time.monotonic() > deadline or any(program.process.poll() is not None for program in self.programs):
                raise RuntimeError(f"the training has not begun:\n{self.kill()}")
            time.sleep(0.02)
            for path in self.told.glob("[0-9]"):
                pid, host = path.read_text().split()
                self.ranks[int(path.name)] = int(pid), host

    def kill(self) -> str:
        """End what is left; all output."""
        for program in self.programs:
            program.kill()
        return "".join(text for program in self.programs for text in program.process.communicate())


def run(net: TwoHosts, trial: Trial) -> Outcome:
    """Start the training, bring the fault, and wait for the end."""
    with tempfile.TemporaryDirectory() as name:
        folders = told, memory, temporary = [Path(name, part) for part in ("told", "shm", "tmp")]
        for folder in folders:
            folder.mkdir()
        command = [sys.executable, "-m", "tests.faults.hosts_job", str(told)]
        programs = [
            Program(own_memory(memory) + words, {"TMPDIR": str(temporary), "DISTOPT_TIMEOUT": "100", **env})
            for words, env in LAUNCHERS[trial.launcher](net, command)
        ]
        job = _Job(programs, told)
        try:
            job.wait_until_trains()
            time.sleep(trial.delay)
            pid, _ = job.ranks[trial.rank]
            if trial.fault in LINKS:
                net.cut(silently=trial.fault == "packets lost")
                missed = [rank for rank, (_, place) in job.ranks.items() if place != net.hosts[0].name]
            else:
                os.kill(pid, SIGNALS[trial.fault])
                missed = [trial.rank]
            began = time.monotonic()
            while (running := job.pids()) and time.monotonic() - began < GIVEN_UP_SECONDS:
                time.sleep(0.02)
            seconds = time.monotonic() - began
        finally:
            output = job.kill()
            net.mend()
        names = "|".join(_name(rank, *job.ranks[rank]) for rank in missed)
        return Outcome(
            trial,
            seconds,
            [line for line in output.splitlines() if re.search(names, line)],
            [path.name for folder in (memory, temporary) for path in folder.iterdir()],
            [program.process.returncode for program in programs],
            output + "".join(f"still running: {pid} {name}\n" for pid, name in running.items()),
        )


def _name(rank: int, pid: int, host: str) -> str:
    # distopt run names a lost host by its ranks.
    node = rf"\(ranks {rank} to {rank + RANKS_PER_HOST - 1}\), {host} "
    return rf"rank {rank} on {host} \(pid {pid}\)|rank {rank} \(host {host}, pid {pid}\)|{node}"


# -- many ------------------------------------------------------------------------------------------------------------
def table(outcomes: Sequence[Outcome]) -> str:
    """One line per launcher and fault."""
    heads = ("launcher", "fault", "n", "median s", "max s", "late", "unnamed", "lines", "left over", "code 0")
    rows = [heads]
    for launcher, fault in dict.fromkeys((o.trial.launcher, o.trial.fault) for o in outcomes):
        these = [o for o in outcomes if (o.trial.launcher, o.trial.fault) == (launcher, fault)]
        seconds = [o.seconds for o in these]
        rows.append(
            (
                launcher,
                fault,
                str(len(these)),
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
                str(sum(s > PROMISED_SECONDS[fault] for s in seconds)),
                str(sum(not o.namings for o in these)),
                f"{statistics.mean(len(o.namings) for o in these):.1f}",
                str(sum(bool(o.left) for o in these)),
                str(sum(not all(o.codes) for o in these)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hosts", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each fault under each launcher")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--verbose", action="store_true", help="print what every job has written")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    outcomes = []
    print(f"--seed {options.seed}", "Open MPI" if is_open_mpi() else "MPICH", flush=True)
    with two_hosts() as net:
        pairs = product(options.launchers.split(","), options.faults.split(","))
        for (launcher, fault), _ in product(pairs, range(options.trials)):
            trial = Trial(launcher, fault, rng.randrange(SIZE), rng.uniform(0.0, 1.0))
            outcome = run(net, trial)
            outcomes.append(outcome)
            wrong = outcome.faults()
            if wrong or options.verbose:
                print(f"{trial}: {outcome.seconds:.2f} s; {'; '.join(wrong)}\n{outcome.output}", flush=True)
    print(table(outcomes))
    sys.exit(any(outcome.faults() for outcome in outcomes))


if __name__ == "__main__":
    main()
