"""A file by which an agent that starts anew, after SIGKILL, takes the place of the former one in its job.

Raft asks its servers to keep term, vote and log on stable storage: so does `distopt.launch.agents.succession`.
The process that has the file holds a lock on it, so that another knows that the former one has ended. A file that is
older than the others would wait for this node, or than the last boot, counts for nothing: an agent without memory is
just another one. An agent that leaves on the owner's order removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from ..job.topology import boot_id

_MOST_AGENTS = 64  # of one job and one host
_TOUCH_SECONDS = 5.0


class Memory:
    """The file, of the first number that no other process holds.

    Args:
        key: of the job.
        endpoint: where its nodes meet.
        seconds: how old it may be.

    Attributes:
        said: what the former process has kept; None: nothing that counts.
    """

    def __init__(self, key: bytes, endpoint: str, seconds: float) -> None:
        self.said: dict[str, Any] | None = None
        self._boot = boot_id()
        self._touch_at = 0.0
        self._fd = -1
        mark = hashlib.sha256(b"memory" + key + f"{endpoint} {socket.gethostname()}".encode()).hexdigest()[:16]
        for number in range(_MOST_AGENTS):
            self._path = Path(tempfile.gettempdir()) / f"distopt-agent-{os.geteuid()}-{mark}-{number}"
            if self._open():
                break
        if self._fd >= 0 and time.time() < os.fstat(self._fd).st_mtime + seconds:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                kept = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
                self.said = kept["said"] if kept["boot"] == self._boot else None

    def keep(self, said: dict[str, Any]) -> None:
        """Write it for the next process."""
        if self._fd >= 0:
            content = json.dumps({"boot": self._boot, "said": said}).encode()
            with contextlib.suppress(OSError):  # the disk is full: the next process is another agent
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, content, 0)

    def touch(self) -> None:
        """Renew the time of the file, at intervals: this process is alive."""
        if self._fd >= 0 and time.monotonic() > self._touch_at:
            self._touch_at = time.monotonic() + _TOUCH_SECONDS
            os.utime(self._fd)

    def close(self, *, is_kept: bool = False) -> None:
        """Remove the file, unless the next process is to find it; idempotent."""
        if self._fd >= 0:
            if not is_kept:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(fd)
                is_own = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
                if is_own and found.st_ino == self._path.stat().st_ino:
                    self._fd = fd
                    return True
            except OSError:
                pass
            os.close(fd)
        return False
