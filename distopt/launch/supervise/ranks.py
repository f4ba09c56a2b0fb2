"""The ranks that one process has started and supervises: the one supervisor of `launch.main` and of `distopt run`.

A rank that runs distopt reports why it fails (`distopt.launch.end_together.report`). Of another program only the exit
status counts. A rank that has lost a peer fails as a consequence, at any time: that peer may have ended without a
message, and its end may be noticed later. So does a rank that its supervisor ends by SIGTERM or SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...recorder.flight import flight_record
from ...recorder.ring import Ring
from ..end_together.report import VARIABLE
from ..mpi_quirks import is_crash_of_a_send, remove_shared_files
from ..processes import end_of
from ..sockets import handle_events
from ..stopwatch import Stopwatch
from ..words import rank_here
from .orphans import Orphans

_FREEZER_SECONDS = 0.09  # between two looks at the control groups: each takes a few files
LIMITS = {
    errno.EMFILE: "; start fewer ranks, or raise ulimit -n",
    errno.EAGAIN: "; start fewer ranks, or raise ulimit -u or the container's pids.max",
}


@dataclass(frozen=True)
class Failure:
    """How a rank, or a node, has failed.

    Attributes:
        rank: the rank, or the first one of the node.
        code: the exit code that a shell would see.
        text: who has failed, and how.
        is_consequence: whether another failure is known to be the cause, or is more likely to be.
        is_final: whether another start would fail, too.
        is_of_node: whether a node has failed.
    """

    rank: int
    code: int
    text: str
    is_consequence: bool = False
    is_final: bool = False
    is_of_node: bool = False


@contextlib.contextmanager
def starting(rank: int) -> Iterator[None]:
    """Turn errors of the system in the block, which starts a rank, into a usage error that names the limit."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        fact = f"{error}{LIMITS.get(error.errno or 0, '') if isinstance(error, OSError) else ''}"
        if isinstance(error, FileNotFoundError) and error.filename is None:  # multiprocessing calls os.getcwd
            fact = "the working directory has been deleted; change to another"
        raise UsageError(f"rank {rank} cannot be started: {fact}") from None


def first_of(failures: Iterable[Failure], *, between_hosts: bool = False) -> Failure:
    """The failure that caused the others; `failures` are in the order of their arrival.

    A lost node comes before ranks, and consequences come last. Among equals the earliest counts. Between hosts, a crash
    of MPI may be a consequence, too.
    """

    def order(failure: Failure) -> tuple[bool, ...]:
        crashed = between_hosts and is_crash_of_a_send(failure.code)
        return failure.is_consequence, not failure.is_final, crashed

    return min(failures, key=order)


class Rank:
    """A process that is a rank, as its supervisor sees it; how it is started is up to the subclass.

    Attributes:
        rank: rank in the job.
        pid: process id.
        source: descriptor to read its reports from.
        sink: its other end, for the process.
        said: its last message of each kind; see `distopt.launch.end_together.report`.
        exit_code: once it has ended; -n if signal n has ended it.
        ended: whether `poll` has noticed that.
        failure: once it has failed.
        failed_at: when it did, in ns of the monotonic clock.
        ring: its flight record, once it has one.
    """

    fails_by_report = False  # true: when it reports a failure; false: when it has ended

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0
        self.source, self.sink = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.source, False)
        self.said: dict[str, dict[str, Any]] = {}
        self.exit_code: int | None = None
        self.ended = False
        self.failure: Failure | None = None
        self.failed_at = 0
        self.ring: Ring | None = None
        self._received = b""
        self._sent: set[int] = set()  # signals from its supervisor that end it

    # For subclasses.
    def _poll(self) -> int | None:
        """The exit code, if the process has ended."""
        raise NotImplementedError

    def _describe(self, code: int, reported: str | None) -> tuple[int, str]:
        """The exit code that a shell would see, and how the rank has failed; from its report, if there is one."""
        raise NotImplementedError

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        events = os.WSTOPPED | os.WEXITED  # without WEXITED, a process that has just ended would be an error
        state = os.waitid(os.P_PID, self.pid, events | os.WNOHANG | os.WNOWAIT) if self.running else None
        return state is not None and state.si_code == os.CLD_STOPPED

    @property
    def frozen(self) -> bool:
        """Whether cgroup version 2 has frozen the process. A process that version 1 has frozen could not be killed."""
        with contextlib.suppress(OSError):  # it has ended
            groups = Path(f"/proc/{self.pid}/cgroup").read_text().splitlines()
            path = "".join(group[3:] for group in groups if group.startswith("0::"))
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                if (events := Path(f"{root}{path}/cgroup.events")).exists():
                    return "frozen 1" in events.read_text()
        return False

    def release(self) -> None:
        """Reap the process, which has ended or been killed."""
        os.close(self.source)

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        if self.exit_code is None:
            self.exit_code = self._poll()
        return self.exit_code is None

    @property
    def left(self) -> bool:
        """Whether it leaves because of a signal, together with all other ranks."""
        return "left" in self.said

    @property
    def leaves(self) -> bool:
        """Whether it ends by itself after a signal."""
        return bool(self.said.get("leaves", {}).get("does"))

    def signal(self, signum: int) -> None:
        """Send a signal, if the process runs."""
        if self.running:
            if signum in (signal.SIGTERM, signal.SIGKILL):  # in MPI_Init, they end it at once
                remove_shared_files(self.pid)
            os.kill(self.pid, signum)

    def end(self, signum: int) -> None:
        """End the process by this signal, if it runs: its end is then a consequence of another's."""
        if self.running:
            self._sent.add(signum)
            self.signal(signum)

    def kill(self) -> None:
        """Kill the process."""
        self.end(signal.SIGKILL)

    def poll(self, now: int) -> None:
        """Notice whether the rank has ended or failed."""
        self.ended = not self.running  # before the pipe is read: a rank reports before it ends
        self.read()
        report = self.said.get("failed") if self.exit_code or self.fails_by_report else None
        if self.failure is not None or self.left or (report is None and not self.exit_code):
            return
        if report is not None:
            self.failed_at, is_consequence = report["time"], report["is_consequence"]
            code, text = self._describe(report["code"], report["text"])
        else:
            self.failed_at, is_consequence = now, False
            code, text = self._describe(self.exit_code or 0, None)
        self.failure = Failure(self.rank, code, text, is_consequence or code - 128 in self._sent)

    def read(self) -> bool:
        """Read the rank's reports; False if there can be no more."""
        with contextlib.suppress(BlockingIOError):  # no more now
            while part := os.read(self.source, 1 << 16):
                *lines, self._received = (self._received + part).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    self.said[message["say"]] = message
                    if message["say"] == "records":
                        # At once: a rank that has ended cannot be asked.
                        self.ring = flight_record.add(message["ring"]) or self.ring
            return False
        return True


class LocalRanks:
    """The ranks of this node.

    Args:
        selector: the ranks' reports are registered with it, each with a function to call.

    Attributes:
        failures: of the ranks that have failed, in the order of their failures.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.failures: list[Failure] = []
        self.ranks: list[Rank] = []
        self._selector = selector
        self._ends: list[int] = []
        self._frozen: list[Rank] = []
        self._freezer_at = 0.0  # when to look at the control groups again, by `time.monotonic`
        self._orphans = Orphans(f"{VARIABLE}={os.getpid()} ")

    def add(self, rank: Rank) -> None:
        """Supervise a rank that has been started."""
        self.ranks.append(rank)
        self._orphans.add(rank.pid)
        self._selector.register(rank.source, selectors.EVENT_READ, partial(self._read, rank))
        if (end := end_of(rank.pid)) is not None:  # else its end is noticed a little later
            self._ends.append(end)
            self._selector.register(end, selectors.EVENT_READ, partial(self._forget, end))

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended, as of the last poll."""
        return [rank for rank in self.ranks if not rank.ended]

    @property
    def stopped(self) -> list[Rank]:
        """Running ranks that a signal has stopped or a control group has frozen."""
        if (now := time.monotonic()) >= self._freezer_at:
            self._frozen, self._freezer_at = [rank for rank in self.running if rank.frozen], now + _FREEZER_SECONDS
        return [rank for rank in self.running if rank.stopped or rank in self._frozen]

    def poll(self) -> None:
        """Notice the ranks that have failed or ended."""
        now = time.monotonic_ns()
        before = [rank for rank in self.ranks if rank.failure is not None]
        for rank in self.ranks:
            rank.poll(now)
        found = [rank for rank in self.ranks if rank.failure is not None and rank not in before]
        # If two ends are noticed together, an end by a signal is more likely to have caused the other.
        found.sort(key=lambda rank: (rank.failed_at, (rank.exit_code or 0) >= 0, rank.rank))
        if found:
            self._write_records(found)
        self.failures += [rank.failure for rank in found if rank.failure is not None]

    def _write_records(self, found: list[Rank]) -> None:
        """Write the flight records of all ranks of this node; the texts of these failures say where."""
        for rank in found:
            failure = rank.failure
            if failure is None or failure.code == UsageError.exit_code:
                continue
            if (folder := flight_record.write(failure.text)) and folder not in failure.text:
                rank.failure = replace(failure, text=f"{failure.text.rstrip()}; flight record in {folder}")

    def fail(self, rank: Rank, code: int, text: str) -> None:
        """Count a rank as failed although it has not ended."""
        if rank.failure is None:
            rank.failure = Failure(rank.rank, code, f"{rank_here(rank.rank, rank.pid)} {text}")
            self.failures.append(rank.failure)

    def signal(self, signum: int) -> None:
        """Send a signal to all ranks that run."""
        for rank in self.ranks:
            rank.signal(signum)

    def kill(self) -> None:
        """Kill all ranks, and processes that they have started and left behind."""
        for rank in self.ranks:
            rank.kill()

    def terminate(self) -> None:
        """Send SIGTERM to all ranks that run, except those that have reported a failure of their own.

        Such a rank ends by itself, and may not have printed its traceback yet. A rank that fails as a consequence of
        another's failure gets the signal, since it may be waiting for a rank.
        """
        for rank in self.ranks:
            rank.read()
            if rank.said.get("failed", {}).get("is_consequence", True):
                rank.end(signal.SIGTERM)

    def end(self, seconds: float) -> None:
        """End all ranks by SIGTERM and, after `seconds`, by SIGKILL."""
        self.terminate()
        clock = Stopwatch()
        while self.running:
            if clock.seconds() >= seconds:
                self.kill()
            handle_events(self._selector)
            self.poll()

    def close(self) -> None:
        """Release the ranks' resources; idempotent."""
        self.release()
        self._orphans.close()

    def release(self) -> None:
        """Forget all ranks; if any still run, kill them first."""
        flight_record.forget()
        if self.running:
            self.kill()
        for rank in self.ranks:
            self._forget(rank.source)
            rank.release()
        for end in self._ends:
            self._forget(end)
            os.close(end)
        self.ranks, self._ends = [], []

    def _read(self, rank: Rank) -> None:
        if not rank.read():
            self._forget(rank.source)

    def _forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
