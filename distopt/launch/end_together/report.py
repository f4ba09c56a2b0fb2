"""Reports of a rank to the process that supervises it: `launch.main`, `spawn`, or the agent of `distopt run`.

The supervisor gives each rank a pipe. A message is a line, an object in JSON with the key "say":

- `begun`: the script and the function have been imported;
- `leaves`: whether, from now on, the rank ends by itself after a signal ("does");
- `left`: it ends now, because of a signal, together with all other ranks;
- `failed`: why this rank fails ("text"), with which exit code ("code"), when ("time", in ns of the clock that all
  processes of a host have), and whether as a consequence of another rank's end ("is_consequence");
- `records`: where its flight record lies ("ring", see `distopt.recorder`);
- `stepped`, from rank 0: it has done its first training step ("step"), which ends healing; with the interval of the
  copies from which it has resumed ("every"; 0 for live states);
- `kept`, on several nodes: it has kept own states that are to go to the next node;
- `gives`: it can give its live states when it is asked, and how large they are ("bytes"); then `gave`: it has;
- `modules`, from a rank of each agent that heals: the modules that it has imported ("names").

A program that does not run distopt sends no messages; only the exit status of its end is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...errors import DistoptError
from ..mpi_quirks import shortened

# Process id of the supervisor, and the descriptor that its rank has inherited: -1 for a rank of `spawn`.
VARIABLE = "DISTOPT_SUPERVISOR"


class Supervisor:
    """The process that supervises this one, as this one sees it. A forked child of a rank has none.

    Attributes:
        parting: what to do before a failure is reported.
    """

    def __init__(self) -> None:
        self._fd, self._pid = -1, 0
        self._has_failed = False
        self.parting: Callable[[], object] | None = None
        self._before: Callable[..., object] | None = None

    def find(self) -> None:
        """Find the pipe that the supervisor of this process has named in a variable, if there is one."""
        pid, _, fd = os.environ.get(VARIABLE, "").partition(" ")
        if pid == str(os.getppid()):  # else the variable belongs to an ancestor
            with contextlib.suppress(OSError):  # the program has closed it
                if stat.S_ISFIFO(os.fstat(int(fd)).st_mode):
                    self.open(int(fd))

    def open(self, fd: int) -> None:
        """This process is a rank, and its supervisor reads from the other end of `fd`."""
        self._fd, self._pid = fd, os.getpid()

    @property
    def is_there(self) -> bool:
        """Whether this process has a supervisor that reads its reports."""
        return self._fd >= 0 and os.getpid() == self._pid

    def send(self, what: str, **content: Any) -> None:
        """Send a message, if there is a supervisor."""
        if self.is_there:
            line = memoryview(json.dumps({"say": what, **content}).encode() + b"\n")
            with contextlib.suppress(OSError):  # the supervisor has ended
                while line:
                    line = line[os.write(self._fd, line) :]

    def report_failure(
        self, code: int, text: str, error: BaseException | None = None, *, is_consequence: bool = False
    ) -> None:
        """Say why this rank fails, once; later failures follow from it.

        Args:
            code: the exit code of its end.
            text: why.
            error: the exception, if that is why; it records whether it is a consequence of another rank's end.
            is_consequence: whether this end is known to be one.
        """
        is_consequence |= _is_consequence(error)
        if not self._has_failed:
            self._has_failed = True
            if self.is_there and self.parting is not None:
                self.parting()
            self.send(
                "failed", time=time.monotonic_ns(), code=code, text=shortened(text), is_consequence=is_consequence
            )

    def report_exception(self, error: BaseException, code: int = 1) -> None:
        """Say in one line that this rank fails by an exception; `KeyboardInterrupt` is left to the signal."""
        if self.is_there and not isinstance(error, KeyboardInterrupt):
            lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
            self.report_failure(code, next((line for line in lines if line[:1].strip()), "").strip(), error)

    def hook(self) -> None:
        """From now on, report uncaught exceptions, if there is a supervisor."""
        if self.is_there:
            self._before, sys.excepthook = sys.excepthook, self._uncaught

    def unhook(self) -> Callable[..., object]:
        """Do not report uncaught exceptions any more. Return the `sys.excepthook` to call instead."""
        return self._before if self._before is not None and sys.excepthook == self._uncaught else sys.excepthook

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report_exception(error)  # before the traceback is printed: the failure of another rank may end this one
        if self._before is sys.__excepthook__ and self.is_there and _is_consequence(error):
            with contextlib.suppress(OSError, ValueError):  # the stream has no reader, or is closed
                sys.stderr.write(self.shown(kind, error, trace))
        elif self._before is not None:
            self._before(kind, error, trace)

    def shown(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
        """An exception as it is printed.

        Without its traceback if it follows from another rank's end, whose reason a supervisor prints: it would only say
        where this rank has waited.
        """
        if self.is_there and _is_consequence(error):
            return "".join(traceback.format_exception_only(kind, error))
        return "".join(traceback.format_exception(kind, error, trace))


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None and not (isinstance(error, DistoptError) and error.is_consequence):
        error = error.__cause__
    return error is not None


supervisor = Supervisor()
