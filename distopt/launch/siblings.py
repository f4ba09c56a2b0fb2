"""Processes that the parent of this one started by the same command: the other ranks of this host, before they say so.

A rank that ends before it has joined the others leaves no trace at the meeting point. Its parent might not watch it (a
script that starts `multiprocessing.Process` itself), so the ranks look at each other, as the kernel shows them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

__all__ = ["Absence", "end_with_parent", "ended_siblings", "ends_of_siblings"]

_log = logging.getLogger("distopt")

_seen: set[int] = set()  # siblings that ran when this process started, or later


class Absence:
    """Ranks of this host that have not come: says so in a warning, and finds out when they cannot come any more.

    Args:
        stall_warning: seconds until the warning.
        all_started: whether the parent is known to have started all ranks.
    """

    def __init__(self, stall_warning: float = 10.0, *, all_started: bool = False) -> None:
        self._start = time.monotonic()
        self._warn_after = stall_warning
        self._all_started = all_started
        self._too_few_since: float | None = None

    def check(self, who: str, absent: int, *, present: Container[int] = (), patience: float = 0.5) -> None:
        """Local. To be called again and again while ranks are awaited.

        Args:
            who: clause that says who is absent.
            absent: number of ranks that are awaited.
            present: process ids of those that have come.
            patience: seconds for which too few processes must be there before they count as lost.

        Raises:
            LaunchError: siblings have ended, and too few are left to be the absent ranks.
        """
        now = time.monotonic()
        if now - self._start > self._warn_after:
            self._warn_after = float("inf")
            _log.warning("%s for %.1f s now", who, now - self._start)
        running, ended = _survey()
        lost = sorted(pid for pid in ended if pid not in present)
        left = len([pid for pid in running if pid not in present])
        if left >= absent or not (lost or self._all_started):
            self._too_few_since = None
        elif self._too_few_since is None:
            self._too_few_since = now
        elif now - self._too_few_since > patience:
            pids = f" (pid {', '.join(map(str, lost))})" if lost else ""
            raise LaunchError(f"{who}, and a process of this job{pids} has ended; see the output")


def ended_siblings() -> list[int]:
    """Local. Process ids of siblings that have ended since this process started."""
    return sorted(_survey()[1])


@contextlib.contextmanager
def ends_of_siblings() -> Iterator[dict[int, int]]:
    """Local. For each sibling, a descriptor that can be read once it has ended, by process id."""
    running, ended = _survey()
    with contextlib.ExitStack() as stack:
        fds = {}
        for pid in sorted(running | ended):
            try:
                fds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:  # /dev/null can always be read
                fds[pid] = os.open(os.devnull, os.O_RDONLY)
            except OSError:  # a kernel before 5.3, or a sandbox: the launcher alone watches
                continue
            stack.callback(os.close, fds[pid])
        yield fds


def _survey() -> tuple[set[int], set[int]]:
    """Siblings that run, and those that have run but do not any more."""
    running, zombies = _siblings()
    _seen.update(running)
    return running, _seen - running | zombies


def _siblings() -> tuple[set[int], set[int]]:
    """Those that run, and those that have ended but have not been collected by the parent."""
    own, running, zombies = _command("self"), set(), set()
    for pid in _children(os.getppid()):
        command = _command(str(pid))
        if not command and _name(str(pid)) == _name("self"):
            zombies.add(pid)
        elif command == own and pid != os.getpid():
            running.add(pid)
    return running, zombies


def end_with_parent(*, launched: bool = False) -> None:
    """Local. End this process by SIGTERM when the process that started it has ended.

    By itself that never happens: at its end, a parent waits for its children. Open MPI leaves ranks behind whose
    mpiexec was killed.

    Args:
        launched: the parent is a launcher's, such as mpiexec; otherwise only one that used multiprocessing counts.
    """
    parent = parent_process()
    if parent is not None:
        sentinel = parent.sentinel
    elif launched:
        try:
            sentinel = os.pidfd_open(os.getppid())
        except OSError:  # it has ended, or a kernel before 5.3, or a sandbox: the launcher alone watches
            return
    else:
        return
    threading.Thread(target=_outlive, args=(sentinel,), name="distopt parent", daemon=True).start()


def _outlive(sentinel: int) -> None:
    wait([sentinel])
    _log.error("the process that started this one (pid %d) has ended before it", os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    except OSError:  # the parent has ended, or it is another user's
        return []
    return pids


def _command(pid: str) -> bytes:
    """Command line but for its numbers, which differ between the children of multiprocessing; empty for a zombie."""
    try:
        return re.sub(rb"\d+", b"#", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return b""


def _name(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return b""


def _look() -> None:
    _seen.clear()
    _seen.update(_siblings()[0])


_look()
os.register_at_fork(after_in_child=_look)
