"""The processes that `spawn` starts, as ranks: around the script's function, and what they tell their parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import DistoptError, PeerLostError, Preempted, UsageError
from ..ending import die_with, shortened
from .output import mark_output
from .task import in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import FrameType, TracebackType

    from ..join.multiprocess import Ticket

__all__ = [
    "BEGUN",
    "HEEDLESS",
    "LEAVES",
    "LEFT",
    "PREEMPTION_SIGNALS",
    "SIGNALS",
    "Announced",
    "invitation",
    "leaves_by_itself",
    "run_rank",
]

# Messages of a rank. Any other is its failure.
BEGUN = b"begun"  # has imported the script and the function
LEAVES = b"leaves"  # now puts preemption signals off until it can leave
HEEDLESS = b"heedless"  # no more so
LEFT = b"left"  # because of one, together with all other ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What schedulers send before they end a job: of their own accord, or because a job script or submitit asks for it.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_reports: list[Connection] = []
_pid = os.getpid()  # of the rank


def leaves_by_itself(does: bool) -> None:
    """Local. Tell the parent whether this rank ends by itself after a signal, so that it is given the time to.

    Args:
        does: whether it does from now on. Nobody is told in a process that `spawn` has not started.
    """
    for reports in _reports:
        reports.send_bytes(LEAVES if does else HEEDLESS)


_invitation: list[tuple[Ticket, int, int]] = []


def invitation() -> tuple[Ticket, int, int] | None:
    """Local. Ticket, rank and world size of the job whose `main` or `spawn` started this process, if one did."""
    return _invitation[0] if _invitation else None


class Announced:
    """The pipe to the parent. When a child has unpickled it, errors of unpickling what follows are reported there.

    Left to itself, multiprocessing would print a traceback per child.
    """

    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def __reduce__(self) -> tuple[Callable[[Connection], tuple[Connection, Any]], tuple[Connection]]:
        return _announce, (self._reports,)


def _announce(reports: Connection) -> tuple[Connection, Any]:
    """The pipe, and the excepthook that `run_rank` must restore."""
    before = sys.excepthook
    sys.excepthook = partial(_report_unloadable, reports)
    return reports, before


def _report_unloadable(
    reports: Connection, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    for _ in range(3):  # frames of multiprocessing
        trace = trace.tb_next if trace else None
    if trace:  # code of the user's, which unpickling has called
        _report(reports, 1, "failed:\n" + "".join(traceback.format_exception(kind, error, trace)))
    cure = "pass args that pickle can restore"
    if isinstance(error, (AttributeError, ImportError)):
        cure = "define the function and the classes of args at the top level of a module or of the script, not under "
        cure += "its guard, at a prompt or in a notebook"
    _report(reports, UsageError.exit_code, f"failed: cannot load the function or args ({in_one_line(error)}); {cure}")


def run_rank(
    announced: tuple[Connection, Any], fn: Callable[..., object], args: tuple[Any, ...], ticket: Ticket, parent: int
) -> None:
    """Run `fn(*args)` in this process, a rank, and tell the parent how it ends."""
    reports, sys.excepthook = announced
    reports.send_bytes(BEGUN)
    _reports.append(reports)
    die_with(parent)
    _invitation.append((ticket, *args[:2]))
    # The parent handles Ctrl-C. A handler instead of SIG_IGN, which processes started here would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, _leave)
    mark_output(args[0])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        fn(*args)
    except Preempted as error:
        reports.send_bytes(LEFT)
        raise SystemExit(error.code) from None
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return
        code = error.code if isinstance(error.code, int) else 1
        text = f"left with exit code {code}" if isinstance(error.code, int) else f"left: {error.code}"
        _report(reports, code, text)
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this function's own frame
        code = error.exit_code if isinstance(error, DistoptError) else 1
        if code == UsageError.exit_code:
            _report(reports, code, f"failed: {error}")
        text = "".join(traceback.format_exception(type(error), error, frames))
        _report(reports, code, f"failed:\n{text}", lost_peer=isinstance(error, PeerLostError))
    finally:
        # Already exiting; a second SystemExit would interrupt the cleanup.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _report(reports: Connection, code: int, text: str, *, lost_peer: bool = False) -> NoReturn:
    now = time.monotonic_ns()  # the same clock in all processes of a host
    if os.getpid() != _pid:  # forked from the rank, whose end this is not
        sys.stderr.write(f"process {os.getpid()}, which rank {_invitation[0][1]} has forked, {text.rstrip()}\n")
        raise SystemExit(code & 0xFF or 1)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        reports.send_bytes(json.dumps([lost_peer, now, code, shortened(text)]).encode())
    raise SystemExit(code & 0xFF or 1)


def _leave(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)
