"""The exit of a rank under an MPI launcher, so that no other rank waits for it forever.

If a single rank exits early, MPI_Finalize, and with it the whole job, waits forever. Therefore, in jobs of more than
one rank:

- An uncaught exception prints its traceback and calls MPI_Abort(1). The code of an error of distopt is the error's own,
  Ctrl-C gives 130.
- `sys.exit(n)` with n != 0 calls MPI_Abort(n) when the interpreter ends, unless the job was closed before. MPICH's
  mpiexec ends with 9 instead of n if it has to kill another rank.
- `os._exit(0)` and C's `exit(0)` print a line, and end this process with code 1. After the job was closed,
  `os._exit(0)` calls MPI_Finalize first.

This applies from MPI_Init on, which `launch.main` calls before the script's function, and `launch.join` at the latest.
MPI may not notice a process that exits before that. Ranks of the same host usually notice it; others end after
`DISTOPT_TIMEOUT`. From `MpiJob` on, ranks watch each other: `distopt.launch.end_together.lifeline`.

Only the process that joined the job acts for its rank. A child forked from it may raise, exit or end as it likes. In a
script that imports mpi4py.MPI before distopt, mpi4py itself calls MPI_Finalize at the end of every forked child, which
breaks the job: end such children by `os._exit`.

Hazard: the value of an uncaught `raise SystemExit(n)` cannot be observed in Python. A rank that exits this way outside
`launch.main` closes its communicators; peers that wait for it raise, and the job ends with their exit code. Use
`sys.exit(n)` instead. A script that catches its own `sys.exit` and continues should close the job at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Protocol

from ... import _core
from ...errors import DistoptError, UsageError
from .. import mpi_quirks
from ..processes import exit_status
from ..words import rank_here
from .lifeline import Lifeline
from .parent import end_with_parent
from .report import supervisor

_EARLY = "left by {} before MPI_Finalize, which ends the other ranks; return from the script or use sys.exit"


class Closable(Protocol):
    """A communicator, for this package."""

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""

    def close(self) -> None:
        """Release it; the other ranks' operations then fail."""


class ExitGuard:
    """Ends the whole job when this rank leaves it by an exception, `sys.exit(n)`, `os._exit(0)` or C's `exit(0)`.

    A process that ends with code 0 and without MPI_Finalize is a success for MPICH's mpiexec, which kills the others.

    Attributes:
        communicators: to be closed at the end. Kept even if the script has dropped them, so that peers are notified.
        farewells: functions to call after that.
        others: reports the ends of other ranks; None without a lifeline.
    """

    def __init__(self) -> None:
        self.communicators: list[Closable] = []
        self.farewells: list[Callable[[], object]] = []
        self.others: Lifeline | None = None
        self._jobs: set[int] = set()
        self._left = False  # all jobs were closed
        self._exit_code = 0
        self._mpi: Any = None
        self._rank = 0
        self._pid = 0

    def arm(self, mpi: ModuleType) -> None:
        """From now on, leaving early ends the job."""
        if self._mpi is None:
            self._mpi, self._pid, self._rank = mpi, os.getpid(), mpi.COMM_WORLD.rank
            # MPI_Finalize, which the script may call, begins with the attributes of COMM_SELF.
            mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=self._finalizing), None)
            sys.excepthook = partial(self._uncaught, supervisor.unhook())
            # Both must be replaced. Whether to close the communicators or to abort is decided in an
            # exit handler of Python, which does not get the exit code; C's `on_exit` gets it when Python has ended.
            sys.exit = partial(self._exit, sys.exit)
            # os._exit calls no handler at all, and mpiexec acts on the code at once.
            os._exit = partial(self._exit_now, os._exit)
            _core.refuse_early_exit(self._says(_EARLY.format("exit(0) of C")))
            atexit.register(self._at_exit)
            mpi_quirks.keep_hangups()
            end_with_parent(launched=True)

    def joined(self, job: object) -> None:
        """This process has joined a job, which it may not leave early."""
        self._jobs.add(id(job))
        self._left = False

    def closed(self, job: object) -> None:
        """This process has closed a job. After the last one, it may end early."""
        if id(job) in self._jobs:
            self._jobs.remove(id(job))
            self._left = not self._jobs

    @property
    def armed(self) -> bool:
        """Whether leaving early ends the job."""
        return self._mpi is not None

    @property
    def _is_rank(self) -> bool:
        return os.getpid() == self._pid

    def _uncaught(
        self, before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        code = 130 if interrupted else error.exit_code if isinstance(error, DistoptError) else 1
        supervisor.report_exception(error, code)
        if self._left or not self._is_rank:
            before(kind, error, trace)
            return
        who = self._says("failed:")
        if before is sys.__excepthook__:
            # In a single write: mpiexec may end this process between two writes because another rank failed.
            _say(mpi_quirks.shortened(who + supervisor.shown(kind, error, trace)))
        else:
            _say(who)
            before(kind, error, trace)
        self.abort(code)

    def _exit(self, before: Callable[[Any], NoReturn], status: object = None, /) -> NoReturn:
        if self._is_rank:
            self._exit_code = exit_status(status)
        before(status)

    def _exit_now(self, before: Callable[[int], NoReturn], status: int) -> NoReturn:
        if self._is_rank and status & 0xFF == 0:
            if self._left and threading.current_thread() is threading.main_thread():
                self._finalize()
                _core.refuse_early_exit("")
                mpi_quirks.exit_well()
            _say(self._says(_EARLY.format("os._exit(0)")))
            if self.others is not None:
                self.others.end_others(1)
            time.sleep(mpi_quirks.FORWARD_SECONDS)
            status = 1
        before(status)

    def _at_exit(self) -> None:
        if not self._is_rank:
            return
        _core.refuse_early_exit("")
        if self._exit_code and not self._left:
            if self._exit_code != UsageError.exit_code:  # a usage error has already been reported
                _say(self._says(f"left with exit code {self._exit_code}"))
            self.abort(self._exit_code)
        self._close()  # after sys.exit, too, no peer may wait for this rank
        if self.others is not None:
            self._finalize()  # waits for the other ranks while a thread still hears of their end

    def _close(self) -> None:
        while self.communicators:
            with contextlib.suppress(UsageError):  # a daemon thread of the script waits in it
                self.communicators.pop().close()
        while self.farewells:
            self.farewells.pop()()

    def _finalizing(self, *_: object) -> None:
        if self._is_rank:
            self._close()

    def _finalize(self) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()
        if self.others is not None:
            self.others.leave()

    def _says(self, text: str) -> str:
        return f"{rank_here(self._rank, os.getpid())} {text}\n"

    def abort(self, code: int) -> None:
        """End all ranks of the launcher's job."""
        for stream in (sys.stdout, sys.stderr):
            _try(stream.flush)
        time.sleep(mpi_quirks.FORWARD_SECONDS)
        if not self._mpi.Is_finalized():
            if self.others is not None:
                self.others.end_others(code)
            mpi_quirks.abort(self._mpi, code)


def _say(text: str) -> None:
    _try(partial(sys.stderr.write, text))


def _try(use: Callable[[], object]) -> None:
    """Use a standard stream, if that is possible."""
    with contextlib.suppress(OSError, ValueError):  # its reader has ended; the script has closed it
        use()


def finalize_at_exit(mpi: Any) -> None:
    """Call MPI_Finalize when the interpreter of this process ends.

    mpi4py would also call it in a forked child, where it breaks the connections of the rank.
    """
    atexit.register(_finalize, mpi, os.getpid())


def _finalize(mpi: Any, pid: int) -> None:
    if os.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def close_at_exit(communicator: Closable) -> None:
    """Close `communicator` before MPI_Finalize, which waits for the peers that wait for this rank in it."""
    if guard.armed:
        guard.communicators = [*(other for other in guard.communicators if not other.closed), communicator]


def after_closing(farewell: Callable[[], object]) -> None:
    """Call `farewell` when the interpreter ends, after communicators are closed and before MPI is finalized."""
    guard.farewells.append(farewell)


guard = ExitGuard()
