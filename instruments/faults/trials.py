"""One trial: a job, one fault, and how the job ends."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.networks.emulation import TwoHosts
from tests.processes import Program, is_open_mpi, patience

from .kinds import ENDED, GOES_ON, KINDS, LAUNCH, LINKS, MAY_GO_ON, MISTAKES, STALLS, START, Kind
from .ways import WAYS, Way, own_memory

# Seconds, on a quiet machine; see `patience`.
TIMEOUT = 4.0  # DISTOPT_TIMEOUT of jobs with a stalled rank
LONG = 100.0  # of all others, however busy the machine: none of them may get there
SURVIVAL = 5.0  # that the survivors of a fault may live on
LINK_SURVIVAL = 10.0  # of the loss of a link
FINISH = 60.0  # for a job to start, or to continue to its end
LAUNCH_WAYS = [name for name, way in WAYS.items() if way.by_mpiexec and way.hosts == 1]


class Trial(NamedTuple):
    """One job and its fault, by names of `KINDS`, `WAYS` and `PLACES`. `delay`: seconds into a collective."""

    kind: str
    way: str
    place: str
    world_size: int = 2
    rank: int = 1
    delay: float = 0.2

    def __str__(self) -> str:
        """As `parse` takes it."""
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Trial:
        kind, way, place, world_size, rank, delay = text.split(":")
        return cls(kind, way, place, int(world_size), int(rank), float(delay))

    @classmethod
    def draw(cls, rng: random.Random, kind: str, way: str) -> Trial:
        """A trial of this kind with what is left to chance."""
        places = [place for place in KINDS[kind].places if place != LAUNCH or way in LAUNCH_WAYS]
        size = rng.choice(WAYS[way].sizes)
        # The others see a mistake of rank 0 only as their difference from it.
        rank = size - 1 if KINDS[kind].last else rng.randrange(1 if kind in MISTAKES else 0, size)
        return cls(kind, way, rng.choice(places), size, rank, round(rng.uniform(0.0, 0.4), 2))

    @property
    def waits(self) -> bool:
        """Whether nothing but the time-out ends the job."""
        kind, way = KINDS[self.kind], WAYS[self.way]
        # MPI does not report such an end before the ranks have met, nor mpiexec always a death between hosts.
        missed = (kind.leaves and way.by_mpiexec) or (kind.silent and way.by_mpiexec and way.hosts == 2)
        return kind.waits or self.place == LAUNCH or (missed and self.place == START)


def explanation(trial: Trial) -> str:
    """Why the rank may go without a name; empty if it may not."""
    if KINDS[trial.kind].silent and WAYS[trial.way].by_mpiexec:
        return "mpiexec ends all ranks at once, and its report may be about another one"
    return ""


def is_possible(kind: str, way: str) -> bool:
    """Whether a fault of this kind can come to ranks started that way."""
    return re.search(KINDS[kind].ways, way) is not None


@dataclass
class Outcome:
    """The outcome of a trial.

    Attributes:
        seconds: from the fault, or the time-out that must end the job, to the end of the last process; None if
            the job continues.
        hangs: processes were still there when all had to be gone.
        unnamed: the output does not name the rank, which it had to but for what `explanation` says.
        left: files that remain in shared memory and in the folder for temporary files, except flight records.
        ends_well: every program has ended with code 0, which it must not.
        others: what else did not hold.
        output: all that the job has written.
    """

    trial: Trial
    seconds: float | None = None
    hangs: bool = False
    unnamed: bool = False
    left: list[str] = field(default_factory=list)
    ends_well: bool = False
    others: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def faults(self) -> str:
        """The violations."""
        found = ["hangs"] * self.hangs + ["exit code 0"] * self.ends_well
        if self.unnamed and not explanation(self.trial):
            found.append("the rank is not named")
        return "; ".join([*found, *[f"{name} remains" for name in self.left], *self.others])


class Gone(NamedTuple):
    """A rank, as it has told of itself."""

    rank: int
    pid: int
    host: str


class Job:
    """A job at work. Its streams are read by threads."""

    def __init__(self, trial: Trial, net: TwoHosts | None, folder: Path) -> None:
        self.trial, self.net = trial, net
        self.kind: Kind = KINDS[trial.kind]
        self.way: Way = WAYS[trial.way]
        self.told, memory, temporary = self.folders = [folder / name for name in ("told", "shm", "tmp")]
        for path in self.folders:
            path.mkdir()
        self.timeout = float(round(patience(TIMEOUT))) if trial.waits or trial.kind in STALLS else LONG
        env = {
            "DISTOPT_TRANSPORT": self.way.transport,
            "DISTOPT_TIMEOUT": str(self.timeout),
            "DISTOPT_STALL_WARNING": "0.5" if trial.kind in STALLS else "50",
            "TMPDIR": str(temporary),
        }
        words = [self.way.start, trial.kind, trial.place, trial.world_size, trial.rank, trial.delay, self.told]
        script = [*inherited(trial.kind), sys.executable, "-m", "instruments.faults.job", *map(str, words)]
        self.lines: list[str] = []
        self.programs = [
            Program(own_memory(memory) + command, env) for command in self.way.programs(trial.world_size, script, net)
        ]
        streams = [stream for program in self.programs for stream in (program.process.stdout, program.process.stderr)]
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream) -> None:
        with stream:
            for line in stream:
                self.lines.append(line.rstrip("\n")[:2000])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def finished(self) -> int:
        """Number of ranks that have come to their ends."""
        return len([*self.told.glob("finished[0-9]")])

    def fault(self) -> tuple[float, int] | None:
        """When the fault came, and in which process; None: not yet."""
        path = self.told / "fault"
        if not path.exists():
            return None
        at, pid = path.read_text().split()
        return float(at), int(pid)

    def missed(self) -> list[Gone]:
        """The job must name one of these ranks."""
        ranks = []
        for path in self.told.glob("rank[0-9]"):
            pid, host = path.read_text().split()
            ranks.append(Gone(int(path.name[4:]), int(pid), host))
        if self.trial.kind in (*LINKS, "short outage"):
            return [gone for gone in ranks if gone.host != self.net.hosts[0].name]
        return [gone for gone in ranks if gone.rank == self.trial.rank]

    def pids(self) -> dict[int, str]:
        return {pid: name for program in self.programs for pid, name in program.pids().items()}

    def signal(self, signum: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # ended
                os.kill(pid, signum)

    def end(self) -> None:
        """End what is left."""
        for program in self.programs:
            program.kill()
            program.process.wait()
        for reader in self._readers:
            reader.join()


def inherited(kind: str) -> list[str]:
    """The start of a command line that runs the rest with what `kind` lets it inherit."""
    return {
        "SIGCHLD ignored": ["env", "--ignore-signal=CHLD"],
        "stdout closed": ["sh", "-c", 'exec "$@" >&-', "sh"],
    }.get(kind, [])


def run(trial: Trial, net: TwoHosts | None = None) -> Outcome:
    """Start the job, bring the fault, wait for the end, and look at what is there then.

    Args:
        trial: the job and its fault.
        net: the hosts, if the way has two.
    """
    outcome = Outcome(trial)
    with tempfile.TemporaryDirectory() as name:
        job = Job(trial, net, Path(name))
        try:
            watch(job, outcome)
        except TimeoutError as error:
            outcome.hangs = True
            outcome.others.append(str(error))
        finally:
            job.end()
            if trial.kind in (*LINKS, "short outage"):
                net.mend()
        # Sockets need no look: abstract ones end with the last process, others would be files.
        outcome.left = [
            path.name for folder in job.folders[1:] for path in folder.iterdir() if not is_alien(trial, path)
        ]
        outcome.output = job.text
        if not outcome.hangs:
            judge(job, outcome)
    return outcome


def is_alien(trial: Trial, path: Path) -> bool:
    """Whether a file may remain.

    Flight records are written for the user. Files of the MPI library could only be removed by a process that the fault
    has ended.
    """
    if path.name.startswith("distopt-flight-"):
        return True
    way = WAYS[trial.way]
    # Ranks that have not come out of MPI_Init, which mpiexec ends by SIGKILL: those of the other host, or all others.
    if trial.place == LAUNCH or (trial.place == START and way.by_mpiexec and way.hosts == 2):
        return path.name.startswith(("mpich_shm_", "ucx_shm_posix_"))
    return trial.kind == "parent killed" and path.name.startswith(("ompi.", "sm_segment."))


# -- until the end ---------------------------------------------------------------------------------------------------
def watch(job: Job, outcome: Outcome) -> None:
    """Do the harm that comes from outside, wait for the end of all processes, and note when it came."""
    wait_for(lambda: job.fault() is not None or not running(job), FINISH, job)
    found = job.fault()
    if found is None:
        outcome.others.append("no fault came")
        return
    at, pid = found
    harm_from_outside(job, pid)
    if job.kind.end in (GOES_ON, MAY_GO_ON):
        wait_for(lambda: not job.pids(), FINISH, job)
        return
    if job.trial.kind in LINKS:
        at = time.monotonic()
    limit = LINK_SURVIVAL if job.trial.kind in LINKS else SURVIVAL
    wait_for(lambda: not survivors(job, pid), limit + (job.timeout if job.trial.waits else 0.0), job, since=at)
    outcome.seconds = max(0.0, time.monotonic() - at - (job.timeout if job.trial.waits else 0.0))
    if job.kind.waits:  # it may be unsupervised; once it can run it must end, too
        (job.told / "go on").touch()
    job.signal(signal.SIGCONT)
    wait_for(lambda: not job.pids(), SURVIVAL, job)


def running(job: Job) -> bool:
    return any(program.process.poll() is None for program in job.programs)


def survivors(job: Job, pid: int) -> list[int]:
    """Processes of the job, except an unsupervised stalled one and those that wait for it."""
    found = job.pids()
    if job.trial.kind == "unseen by mpiexec":  # the ranks alone; the launcher is stopped
        return [other for other, name in found.items() if name.startswith(sys.executable)]
    unsupervised = job.kind.waits and (job.way.start == "raw" or job.way.apart)
    ignored = {pid, *(program.process.pid for program in job.programs)} if unsupervised else set()
    return [other for other, name in found.items() if other not in ignored and "resource_tracker" not in name]


def harm_from_outside(job: Job, pid: int) -> None:
    kind, program = job.trial.kind, job.programs[0].process
    if kind in ("parent killed", "interrupt", "terminated"):
        time.sleep(job.trial.delay)
    if kind == "parent killed":
        program.kill()
    elif kind == "terminated":
        program.terminate()
    elif kind == "short outage":
        job.net.cut(silently=False)
        time.sleep(4.5 + 4.0 * job.trial.delay)
        job.net.mend()
    elif kind == "interrupt":
        os.killpg(program.pid, signal.SIGINT)
    elif kind in LINKS:
        job.net.cut(silently=kind == "packets lost")
    elif kind == "pause":
        wait_for(lambda: is_named(job), 30.0, job)
        os.kill(pid, signal.SIGCONT)
    elif kind == "whole job suspended":
        time.sleep(job.trial.delay)
        job.signal(signal.SIGSTOP)
        time.sleep(job.timeout + 1.0)
        job.signal(signal.SIGCONT)


def wait_for(condition: Callable[[], bool], seconds: float, job: Job, since: float | None = None) -> None:
    began = time.monotonic() if since is None else since
    while not condition():
        if (waited := time.monotonic() - began) > patience(seconds):
            raise TimeoutError(f"still there after {waited:.1f} s: {job.pids()}")
        time.sleep(0.05)


# -- what must hold --------------------------------------------------------------------------------------------------
def judge(job: Job, outcome: Outcome) -> None:
    """Note what did not hold of a job that has ended."""
    trial, kind = job.trial, job.kind
    codes = [program.process.returncode for program in job.programs]
    if kind.end == GOES_ON or (kind.end == MAY_GO_ON and not any(codes)):
        if any(codes) or job.finished != trial.world_size:
            outcome.others.append(f"does not go on: exit codes {codes}, {job.finished} ranks finished")
        return
    outcome.ends_well = not (any(codes) if job.way.apart else all(codes))
    if job.finished:
        outcome.others.append(f"{job.finished} ranks finished")
    if kind.code is not None and trial.place != LAUNCH and job.way.tells_codes and codes[0] != kind.code:
        outcome.others.append(f"exit codes {codes} instead of {kind.code}")
    speechless = trial.kind == "interrupt" and job.way.by_mpiexec and is_open_mpi()  # mpiexec ends all at once
    if kind.says and not speechless and not re.search(kind.says, job.text):
        outcome.others.append(f"does not say {kind.says!r}")
    outcome.unnamed = kind.end != ENDED and not is_named(job)


def is_named(job: Job) -> bool:
    """Whether a message is about one of the ranks that are missed: by number, and by host and process where known."""
    forms = [form for gone in job.missed() for form in names(*gone)]
    if job.trial.place == LAUNCH:
        # MPI_Init knows neither the numbers of the others nor, of those that are late, who they are.
        forms += [r"has waited \S+ s in MPI_Init: a rank did not start", r"in MPI_Init, and a process .* has ended"]
    return re.search("|".join(forms), job.text) is not None


def names(rank: int, pid: int, host: str) -> list[str]:
    host = re.escape(host)
    return [
        rf"rank {rank} \(host {host}, pid {pid}\)",
        rf"rank {rank} on {host} \(pid {pid}\)",
        rf"rank {rank} of \d+ on {host} \(pid {pid}\)",
        rf"rank {rank} \(pid {pid}\)",
        rf"ranks? {rank} \({host}\)",
        rf"rank {rank} of \d+ did not join",
        rf"for rank {rank} of \d+",
        rf"found no rank {rank} on this host",
        rf"a process of this job \(pid {pid}\) has ended",  # before they have met
        rf"\(ranks? {rank}( to \d+)?\), {host} ",  # of distopt run, which names a lost node by its ranks
        rf"PID {pid} RUNNING AT",  # of MPICH's mpiexec
        rf"process rank {rank} with PID \d+ on node",  # of Open MPI's
    ]
