"""Runs `tests.faults.job` with one fault, and checks what must hold however a job ends."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.processes import Program, is_open_mpi, mpiexec_command, patience

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds, of a quiet machine the first and the last; see `patience`.
TIMEOUT = 4.0  # DISTOPT_TIMEOUT of jobs with a stalled rank
LONG = 100.0  # of all others: none of them may get there
SURVIVAL = 5.0  # that the survivors of a fault may live on
_PRIVATE = ("unshare", "--mount", "sh", "-c")
MISTAKES = ("count", "type", "operation", "skip", "shm full", "memory", "model")


@dataclass(frozen=True)
class Case:
    """One job and its fault; see `tests.faults.job`. `backend` is that of DISTOPT_BACKEND."""

    start: str
    backend: str
    fault: str
    place: str
    world_size: int = 2
    rank: int = 1
    delay: float = 0.2

    @property
    def waits(self) -> bool:
        """Whether nothing but the time-out can end the job."""
        return self.fault == "stop" or self.place == "launch"

    def __str__(self) -> str:
        return f"{self.start}-{self.backend}-{self.fault}-{self.place}-{self.rank}of{self.world_size}"


@dataclass
class Run:
    """What could be seen of a job."""

    case: Case
    program: Program
    told: Path  # where `tests.faults.job` writes of its fault
    timeout: float  # DISTOPT_TIMEOUT
    lines: list[tuple[str, str]] = field(default_factory=list)  # stream, line

    def text(self, stream: str = "") -> str:
        return "\n".join(line for name, line in self.lines if name == stream or not stream)

    def fault(self) -> tuple[float, int] | None:
        """When the fault came, and in which process; None: not yet."""
        if not self.told.exists():
            return None
        at, pid = self.told.read_text().split()
        return float(at), int(pid)


def run(case: Case) -> Run:
    """Run the job of `case` and check how it ended."""
    with tempfile.TemporaryDirectory() as name:
        temporary, memory, told = Path(name, "tmp"), Path(name, "shm"), Path(name, "fault")
        temporary.mkdir()
        memory.mkdir()
        timeout = float(round(patience(TIMEOUT))) if case.waits else LONG
        program = Program(own_memory(memory) + command(case), environment(case, timeout, temporary, told))
        job = Run(case, program, told, timeout)
        try:
            watch(job)
        finally:
            job.program.kill()
            job.program.process.wait()
        # Sockets need no look: abstract ones end with the last process, others would be files.
        left = [path.name for folder in (temporary, memory) for path in folder.iterdir()]
        if case.place == "launch":  # a file of MPICH's own, which only a process that is through MPI_Init can remove
            left = [name for name in left if not name.startswith("mpich_shm_")]
        if case.fault == "parent" and case.start == "mpiexec":  # Open MPI's own, which its mpiexec removes
            left = [name for name in left if not name.startswith(("ompi.", "sm_segment."))]
        assert not left, f"{case}: files remain: {left}\n{job.text()}"
        check(job)
    return job


def command(case: Case) -> list[str]:
    script = [sys.executable, "-m", "tests.faults.job", case.start, case.fault, case.place]
    script += [str(case.world_size), str(case.rank), str(case.delay)]
    return [*mpiexec_command(case.world_size), *script] if case.start == "mpiexec" else script


def own_memory(folder: Path) -> list[str]:
    """The start of a command line whose /dev/shm is `folder`, where that is allowed: other jobs may be at work here."""
    return [*_PRIVATE, 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)] if can_mount() else []


def full_memory() -> list[str]:
    """The start of a command line in whose /dev/shm nothing fits."""
    return [*_PRIVATE, 'mount -t tmpfs -o size=4k "$0" /dev/shm && exec "$@"', "tmpfs"]


@functools.cache
def can_mount() -> bool:
    """Whether this process may give a program a /dev/shm of its own."""
    done = subprocess.run([*_PRIVATE, "mount -t tmpfs tmpfs /dev/shm"], capture_output=True, check=False)
    return done.returncode == 0


def environment(case: Case, timeout: float, temporary: Path, told: Path) -> dict[str, str]:
    return {
        "DISTOPT_BACKEND": case.backend,
        "DISTOPT_TIMEOUT": str(timeout),
        "DISTOPT_STALL_WARNING": "0.5" if case.fault in ("stop", "pause") else "50",
        "DISTOPT_TEST_FAULT": str(told),
        "TMPDIR": str(temporary),
    }


def watch(job: Run) -> None:
    """Do the harm that comes from outside, wait for the end of all processes, and check when it came."""
    readers = [threading.Thread(target=read, args=(job, stream)) for stream in ("stdout", "stderr")]
    for reader in readers:
        reader.start()
    wait_for(lambda: job.fault() is not None or job.program.process.poll() is not None, 60.0, job)
    found = job.fault()
    if found is None and job.case.fault != "model":
        raise AssertionError(f"no fault came\n{job.text()}")
    at, pid = found or (time.monotonic(), 0)
    harm(job, pid)
    if job.case.fault == "pause":
        wait_for(lambda: bool(names(job.case.rank, pid).search(job.text("stderr"))), 30.0, job)
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not job.program.pids(), 30.0, job)
    else:
        wait_for(lambda: not survivors(job, pid), SURVIVAL, job, since=at + (job.timeout if job.case.waits else 0.0))
        if job.case.fault == "stop" and job.case.start == "raw":
            os.kill(pid, signal.SIGCONT)  # nobody supervises it; once it can run it must end, too
        if job.case.fault == "unseen":
            for launcher in job.program.pids():
                os.kill(launcher, signal.SIGCONT)
        wait_for(lambda: not job.program.pids(), 5.0, job)
    for reader in readers:
        reader.join()


def survivors(job: Run, pid: int) -> list[int]:
    """Processes of the job, but for a stopped one that nobody supervises and the parent that waits for it."""
    if job.case.fault == "unseen":  # the ranks alone; the launcher is stopped
        return [other for other, name in job.program.pids().items() if name.startswith(sys.executable)]
    waits = job.case.start == "raw" and job.case.fault == "stop"
    ignored = {pid, job.program.process.pid} if waits else set()
    found = job.program.pids().items()
    return [other for other, name in found if other not in ignored and "resource_tracker" not in name]


def harm(job: Run, pid: int) -> None:
    if job.case.fault == "parent":
        time.sleep(job.case.delay)
        job.program.process.kill()
    elif job.case.fault == "interrupt":
        time.sleep(job.case.delay)
        os.killpg(job.program.process.pid, signal.SIGINT)


def read(job: Run, stream: str) -> None:
    with getattr(job.program.process, stream) as lines:
        for line in lines:
            job.lines.append((stream, line.rstrip("\n")))


def wait_for(condition: Callable[[], bool], seconds: float, job: Run, since: float | None = None) -> None:
    began = time.monotonic() if since is None else since
    while not condition():
        if (waited := time.monotonic() - began) > patience(seconds):
            raise AssertionError(f"{job.case}: still there after {waited:.1f} s: {job.program.pids()}\n{job.text()}")
        time.sleep(0.05)


# -- what must hold --------------------------------------------------------------------------------------------------
def check(job: Run) -> None:
    case, code = job.case, job.program.process.returncode
    if case.fault == "pause":
        assert code == 0, job.text()
        assert job.text("stdout").count(" finished") == case.world_size
        assert names(case.rank, job.fault()[1]).search(job.text("stderr")), job.text("stderr")
        return
    assert code != 0, job.text()
    assert " finished" not in job.text("stdout"), job.text()
    if case.fault in ("parent", "unseen"):
        return  # nobody is left to be told; a launcher that goes on again drops what it has not read
    if case.start == "mpiexec" and (case.fault == "interrupt" or case.place == "launch") and is_open_mpi():
        return  # its mpiexec ends all ranks at once, and is the only one to say so
    if case.fault == "interrupt":
        assert "KeyboardInterrupt" in job.text("stderr") or "SIGINT" in job.text("stderr"), job.text()
        return
    killed = case.fault in ("SIGKILL", "SIGSEGV", "os._exit")
    if case.fault == "sys.exit" or (case.fault == "os._exit" and case.start != "mpiexec"):
        assert code == 3, job.text()
    if case.start == "mpiexec" and case.place != "launch" and killed:
        return  # mpiexec kills all ranks at once, and its own report may be about another one
    if case.place == "launch":
        # A rank that ends before the other one has looked around is not missed by it.
        late, lost = (
            rf"has waited {job.timeout:g} s in MPI_Init: a rank did not start",
            r"waits in MPI_Init, and a process .* has ended",
        )
        assert re.search(rf"rank 0 of 2 on .* ({late}|{lost})", job.text("stderr"))
        return
    assert names(case.rank, job.fault()[1] if job.fault() else None).search(job.text()), job.text()


def names(rank: int, pid: int | None) -> re.Pattern[str]:
    """A message about `rank`: by number, and by host and process where that is known."""
    host = re.escape(socket.gethostname())
    process = r"\d+" if pid is None else str(pid)
    return re.compile(
        rf"rank {rank} \(host {host}, pid {process}\)|rank {rank} on {host} \(pid {process}\)"
        rf"|rank {rank} \(pid {process}\)|rank {rank} of \d+ did not join|for rank {rank} of \d+"
        rf"|ranks? {rank} \({host}\)|found no rank {rank} on this host"
    )
