"""Siblings: processes started by this one's parent with the same command, presumably the other ranks of this host.

A rank that ends before joining leaves no trace in the rendezvous, and its parent may not watch it (for example, a
script that starts `multiprocessing.Process` itself). The ranks therefore watch each other through /proc.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from ...errors import LaunchError
from ..processes import children, end_of
from ..stopwatch import Stopwatch

_log = logging.getLogger("distopt")

_seen: set[int] = set()  # siblings seen running at any time since this process started


class Absence:
    """Watches for ranks of this host that have not joined: warns, and notices when they cannot join any more.

    Args:
        stall_warning: seconds before the warning.
        all_started: whether the parent is known to have started all ranks.
    """

    def __init__(self, stall_warning: float = 10.0, *, all_started: bool = False) -> None:
        self._clock = Stopwatch()
        self._warn_after = stall_warning
        self._all_started = all_started
        self._too_few_since: float | None = None

    def check(
        self, who: str | Callable[[], str], absent: float, *, present: Container[int] = (), patience: float = 0.5
    ) -> None:
        """Call this repeatedly while waiting for ranks.

        Args:
            who: clause that names the missing ranks, or gives it.
            absent: number of missing ranks.
            present: process ids of the ranks that have joined.
            patience: ranks count as lost after this number of seconds with too few processes.

        Raises:
            LaunchError: siblings have ended, and fewer are left than ranks are missing.
        """
        now = self._clock.seconds()
        if now > self._warn_after:
            self._warn_after = float("inf")
            _log.warning("%s for %.1f s now", who if isinstance(who, str) else who(), now)
        running, ended = _survey()
        lost = sorted(pid for pid in ended if pid not in present)
        left = len([pid for pid in running if pid not in present])
        if left >= absent or not (lost or self._all_started):
            self._too_few_since = None
        elif self._too_few_since is None:
            self._too_few_since = now
        elif now - self._too_few_since > patience:
            pids = f" (pid {', '.join(map(str, lost))})" if lost else ""
            who = who if isinstance(who, str) else who()
            raise LaunchError(f"{who}, and a process of this job{pids} has ended; see the output")


@contextlib.contextmanager
def ends_of_siblings() -> Iterator[dict[int, int]]:
    """For each sibling, by process id, a descriptor that becomes readable when it ends."""
    running, ended = _survey()
    with contextlib.ExitStack() as stack:
        fds = {}
        for pid in sorted(running | ended):
            if (fd := end_of(pid)) is not None:  # without it, only the launcher watches
                fds[pid] = fd
                stack.callback(os.close, fd)
        yield fds


def _survey() -> tuple[set[int], set[int]]:
    """Siblings that are running, and those that were running and have ended."""
    running, zombies = _siblings()
    _seen.update(running)
    return running, _seen - running | zombies


def _siblings() -> tuple[set[int], set[int]]:
    """Siblings that are running, and those that have ended but have not been reaped by the parent."""
    own, running, zombies = _process("self"), set(), set()
    for pid in children(os.getppid()):
        name, command = _process(str(pid))
        if name == own[0] and not command:  # its name shows that it is not the process that forks ranks
            zombies.add(pid)
        elif (name, command) == own and pid != os.getpid():
            running.add(pid)
    return running, zombies


def _process(pid: str) -> tuple[bytes, bytes]:
    """Name and command line without its numbers, which differ between the children of multiprocessing.

    The command line of a zombie is empty.
    """
    try:
        command = re.sub(rb"\d+", b"#", Path(f"/proc/{pid}/cmdline").read_bytes())
        return Path(f"/proc/{pid}/comm").read_bytes(), command
    except OSError:
        return b"", b""


def note_running() -> None:
    """Record the siblings that run now as seen."""
    _seen.clear()
    _seen.update(_siblings()[0])


def remember() -> None:
    """From now on, and in forked children from their start on, know the siblings that have run."""
    note_running()
    os.register_at_fork(after_in_child=note_running)
