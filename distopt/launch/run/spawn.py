"""Start the ranks of a job as child processes, and make sure that they end together.

A rank that fails ends the job: the others get SIGTERM and, after a grace period, SIGKILL. The earliest failure is
reported; later ones are its consequences. A lost peer reported by a rank is also a consequence, whatever the time: that
peer ended without a message, and this process may learn of its end later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ...errors import DistoptError, Preempted, RankFailedError, UsageError
from ..ending import ENDED_BY_SIGTERM, caught_signals, describe_exit, waitable_children
from ..join.env import RUN, launcher
from ..join.meeting import meeting
from ..join.mpi import start_mpi
from ..join.multiprocess import UNGUARDED, Ticket
from ..threads import cores, thread_variables
from .child import BEGUN, HEEDLESS, LEAVES, LEFT, PREEMPTION_SIGNALS, SIGNALS, Announced, run_rank
from .task import NO_GUARD, check_call, check_script, check_sendable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnProcess

    from ..join.env import LauncherInfo

__all__ = ["main", "spawn", "started_as_rank"]

_GRACE_SECONDS = 2.0
_RANKS_PER_CORE = 32  # more are taken for a mistake
_MAX_REPORT_BYTES = 16 << 20
_USER_ERROR = UsageError.exit_code
_launched: list[tuple[int, int]] = []  # rank and world size, if `main` joined a launcher's job instead of starting one


def spawn(fn: Callable[..., object], world_size: int, args: Sequence[Any] = ()) -> None:
    """Run `fn(rank, world_size, *args)` in `world_size` new processes of this host; return when all have ended.

    The children are started with multiprocessing's "spawn" method, so they import the script: it must be a file, and
    call this function under `if __name__ == "__main__":`. `fn` must be a function of a module's or the script's top
    level, and `args` picklable. The children write to this process's stdout and stderr, end with this process however
    it ends, and share the cores: their BLAS threads are capped unless the user has set a number. Output lines of ranks
    above 0 begin with "[rank 1] " and so on. On SIGINT or SIGTERM, all ranks are ended, and then the signal takes its
    previous effect (KeyboardInterrupt, end of the process). So it is with SIGUSR1 and SIGUSR2, if the script has no
    handler for them. Ranks that leave by themselves, see `Checkpoint(preemptible=True)`, are waited for.

    Raises:
        UsageError: `world_size` is not a positive int, or is more than 32 times the number of cores; `fn` cannot be
            called with these arguments; or they cannot be sent. No rank has been started.
        RankFailedError: a rank raised, exited with a code other than 0, or was killed by a signal. The others have
            been ended.
    """
    try:
        signum = _run(fn, world_size, args)
    except DistoptError as error:
        raise error.with_traceback(None) from None  # what it takes to start a rank is no part of the message
    if signum is not None:
        signal.raise_signal(signum)


def main(fn: Callable[..., object], world_size: int | None = None, args: Sequence[Any] = ()) -> None:
    """Run a script's function, and end the process with the proper exit code and message; the last call of a script.

    With `world_size`, this calls `spawn(fn, world_size, args)`; without, `fn(*args)` in this process, which is a rank
    of its launcher's job. If a launcher has already started `world_size` ranks, this process is one of them: it starts
    no others and calls `fn(rank, world_size, *args)`.

    The exit code is that of the first rank that failed, whose traceback is the last output on stderr. A usage error
    prints one line and gives exit code 2. SIGINT and SIGTERM also print one line, and give exit codes 130 and 143. So
    do SIGUSR1 and SIGUSR2. After a signal that has had the job queued again, the exit code is 0.

    Raises:
        SystemExit: a rank failed, or a signal arrived.
    """
    signum = None
    try:
        info = launcher()
        if world_size is not None and info is not None and info.size > 1:
            args, world_size = _as_rank(info, world_size, args), None
        if world_size is None:
            place = meeting(info) if info is not None else None
            if info is not None and not (place is not None and place.one_host):
                start_mpi()
            check_call(fn, (), args)
            fn(*args)
        else:
            signum = _run(fn, world_size, args)
    except RankFailedError as error:
        _last_words(error.details)
        raise SystemExit(error.exit_code) from None
    except DistoptError as error:
        if error.exit_code != _USER_ERROR:
            raise
        _last_words_once(f"error: {error}", launcher())
        sys.exit(_USER_ERROR)
    except Preempted:
        raise  # as all ranks do; not through sys.exit, with which one rank ends the others
    except KeyboardInterrupt:
        info = launcher()
        if info is None or info.name != RUN:
            raise
        sys.stdout.flush()  # the agent says so, once for all ranks
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except SystemExit as error:
        sys.exit(error.code)  # MPI jobs detect an exit only through this call
    if signum is not None:
        _last_words(f"{signal.Signals(signum).name}: all {world_size} ranks have been ended")
        raise SystemExit(128 + signum)


def _as_rank(info: LauncherInfo, world_size: int, args: Sequence[Any]) -> tuple[Any, ...]:
    if world_size != info.size:
        raise UsageError(
            f"{info.name} has started {info.size} ranks ({info.source}), but the script asks launch.main for "
            f"{world_size!r}; start {world_size!r} ranks, or run the script without a launcher"
        )
    _launched.append((info.rank, info.size))
    return (info.rank, info.size, *args)


def started_as_rank(rank: int | None, world_size: int | None) -> bool:
    """Local. Whether `main` runs its function in this process as that rank of a launcher's job."""
    return (rank, world_size) in _launched


def _last_words_once(text: str, info: LauncherInfo | None) -> None:
    """Print it, unless another rank of this host has just printed the same."""
    if info is None or info.size == 1:
        _last_words(text)
        return
    if info.rank > 0:
        time.sleep(_GRACE_SECONDS / 10)  # if rank 0 reports the same error, it goes first, and may end the job
    same = text.replace(info.source, "")  # the rank's own numbers
    name = hashlib.sha256(f"distopt {os.getuid()} {os.getppid()} {same}".encode()).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX) as said:  # an abstract name, which one process at a time can have
        try:
            said.bind(f"\0distopt-{name}")
        except OSError:
            return
        _last_words(text)
        time.sleep(_GRACE_SECONDS / 2)  # for ranks that are slower


def _last_words(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


# -- parent ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, order=True)
class _Failure:
    is_consequence: bool
    time_ns: int
    rank: int
    exit_code: int
    details: str


class _Rank:
    """A child process, as the parent sees it."""

    def __init__(
        self, fn: Callable[..., object], rank: int, world_size: int, args: tuple[Any, ...], ticket: Ticket
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self._begun = False  # has imported the script and the function
        self.leaves = self.left = False  # see `child.LEAVES` and `child.LEFT`
        self._failure: _Failure | None = None
        reports, child_end = context.Pipe(duplex=False)
        self.reports: Connection | None = reports
        try:
            self.process: SpawnProcess = context.Process(
                target=run_rank,
                args=(Announced(child_end), fn, (rank, world_size, *args), ticket, os.getpid()),
                name=f"rank {rank}",
            )
            self.process.start()
        except Exception:
            check_sendable(fn, args)
            raise
        finally:
            child_end.close()

    def failure(self) -> _Failure | None:
        """How the rank failed, if it has."""
        if self._failure is None:
            # Checked before the pipe is read: a rank writes its report before it ends.
            exit_code = self.process.exitcode
            who = f"rank {self.rank} (pid {self.process.pid})"
            report = self._read_report()
            if report is not None:
                lost_peer, time_ns, code, text = report
                self._failure = self._failed(time_ns, code, f"{who} {text}", lost_peer=lost_peer)
            elif exit_code and not self.left:
                code, text = (_describe if self._begun else _describe_false_start)(exit_code)
                self._failure = self._failed(time.monotonic_ns(), code, f"{who} {text}")
        return self._failure

    def _failed(self, time_ns: int, code: int, details: str, *, lost_peer: bool = False) -> _Failure:
        return _Failure(lost_peer or code == ENDED_BY_SIGTERM, time_ns, self.rank, code, details)

    def _read_report(self) -> tuple[bool, int, int, str] | None:
        report: tuple[bool, int, int, str] | None = None
        while self.reports is not None and self.reports.poll():
            with contextlib.suppress(EOFError, OSError):
                message = self.reports.recv_bytes(_MAX_REPORT_BYTES)
                if message in (BEGUN, LEAVES, HEEDLESS, LEFT):
                    self._begun = True
                    self.leaves, self.left = message != HEEDLESS and (self.leaves or message == LEAVES), message == LEFT
                    continue
                lost_peer, time_ns, code, text = json.loads(message)
                report = bool(lost_peer), int(time_ns), int(code), str(text)
            self.reports.close()
            self.reports = None
        return report

    def release(self) -> None:
        if self.reports is not None:
            self.reports.close()
        self.process.close()


def _run(fn: Callable[..., object], world_size: int, args: Sequence[Any]) -> int | None:
    """Start, watch and end the ranks; return the signal that ended the job, if any.

    A terminal sends signals to parent and children alike: ranks that a signal ended have not failed. Nor have those
    that left because of one, which may have been sent to them alone.
    """
    check_script()
    check_call(fn, ("rank", "world_size"), args)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise UsageError(f"world size {world_size!r} is not a positive int; pass the number of processes to start")
    if world_size > (limit := _RANKS_PER_CORE * len(cores())):
        raise UsageError(f"world size {world_size} is too large for {len(cores())} cores; pass {limit} at most")
    ranks: list[_Rank] = []
    with waitable_children(), caught_signals(_signals_to_catch()) as (caught, wake):
        try:
            _start(ranks, fn, world_size, tuple(args))
            _watch(ranks, caught, wake)
        finally:
            failures = [rank.failure() for rank in ranks]  # of all ranks, before any are ended here
            _end([rank.process for rank in ranks])
            first = min((failure for rank in ranks if (failure := rank.failure())), default=None)
            left = [rank.process.exitcode or 0 for rank in ranks if rank.left]
            for rank in ranks:
                rank.release()
    if len(left) == len(ranks):
        signum = caught[0] if caught else max(left) - 128
        return signum if any(left) else None  # without an exit code, the job will be started again
    if any(failures) and first is not None and not (caught and first.exit_code == ENDED_BY_SIGTERM):
        raise RankFailedError(first.rank, first.exit_code, first.details)
    return caught[0] if caught else None


def _start(ranks: list[_Rank], fn: Callable[..., object], world_size: int, args: tuple[Any, ...]) -> None:
    variables = thread_variables(world_size, os.environ)
    ticket = Ticket()
    # A new process inherits blocked signals, and unblocks them when its handlers are installed. Otherwise Ctrl-C, which
    # a terminal sends to parent and children alike, could print a traceback per child from the middle of its imports.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ.update(variables)
    try:
        ranks.extend(_Rank(fn, rank, world_size, args, ticket) for rank in range(world_size))
    finally:
        for name in variables:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _signals_to_catch() -> set[int]:
    return {*SIGNALS, *(signum for signum in PREEMPTION_SIGNALS if signal.getsignal(signum) is signal.SIG_DFL)}


def _watch(ranks: list[_Rank], caught: list[int], wake: int) -> None:
    """Return when all ranks have ended, one has failed, or a signal has arrived with which ranks must be ended."""
    while True:
        running = [rank for rank in ranks if rank.process.exitcode is None]
        if not running or any(rank.failure() for rank in ranks):
            return
        pipes = [rank.reports for rank in running if rank.reports is not None]
        if wake in wait([wake, *pipes, *(rank.process.sentinel for rank in running)]):
            os.read(wake, 1)
            if caught[-1] not in PREEMPTION_SIGNALS or not all(rank.leaves for rank in running):
                return
            for rank in running:
                os.kill(rank.process.pid or 0, caught[-1])  # ended or not: it has not been waited for


def _end(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def _describe(exit_code: int) -> tuple[int, str]:
    code, text = describe_exit(exit_code)
    return code, f"{text} without a traceback" if exit_code > 0 else text


def _describe_false_start(exit_code: int) -> tuple[int, str]:
    if exit_code == NO_GUARD:
        return _USER_ERROR, UNGUARDED
    if exit_code > 0:
        return exit_code, f"could not import the script (exit code {exit_code}); see its output"
    return describe_exit(exit_code)
