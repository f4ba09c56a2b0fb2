"""A process that outlives a killed supervisor, and ends what the ranks have started.

The kernel kills the ranks then (`die_with`), but not their children, such as the workers of a data loader, which init
adopts. They are found by a variable inherited from their rank. Processes in a session of their own have left
the job on purpose, as daemons do, and are not ended.

This file is also the program of that process. It uses the standard library only, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_LOOK_SECONDS = 0.02  # between two looks: processes may have started others


class Orphans:
    """The process that waits for the end of this one; started at once.

    Args:
        mark: the beginning of a variable that all ranks have, as "NAME=value".
    """

    def __init__(self, mark: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # a limit has been reached; the ranks matter more
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, mark],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a kill of the supervisor may include its process group
            )

    def add(self, pid: int) -> None:
        """Add the session of a rank that has been started."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # the rank or this helper has ended
                self._process.stdin.write(b"%d\n" % os.getsid(pid))

    def close(self) -> None:
        """End the process: the ranks have ended, and this process continues. Idempotent."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


def _marked(mark: bytes, sessions: set[int]) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):  # noqa: PTH208 - names suffice
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or another user's
            if os.getsid(pid) in sessions and mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def _main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    mark = b"\0" + os.fsencode(sys.argv[1])
    sessions = {int(line) for line in sys.stdin.buffer}
    while pids := _marked(mark, sessions):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or changed its user
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    _main()
