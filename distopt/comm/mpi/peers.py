"""The other ranks of this host, as the kernel sees their processes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

# What a rank has sent before it ended may still be on its way.
_PATIENCE_SECONDS = 0.5


class LocalPeers:
    """Notices the end of a rank of this host, which mpiexec may be slow to notice or to act upon.

    Args:
        pids: process ids of the other ranks of this host, by rank.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._ended: dict[int, float] = {}  # rank: when it was noticed
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by descriptor
        for rank, pid in pids.items():
            self._watch(rank, pid)

    def lost(self) -> int | None:
        """Local. A rank whose process ended some time ago, if there is one."""
        now = time.monotonic()
        for fd, _ in self._poll.poll(0):
            self._ended[self._ranks[fd]] = now
            self._forget(fd)
        return next((rank for rank, since in self._ended.items() if now - since > _PATIENCE_SECONDS), None)

    def close(self) -> None:
        """Local. Stop watching; idempotent."""
        for fd in list(self._ranks):
            self._forget(fd)
        self._ended.clear()

    def _watch(self, rank: int, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended[rank] = time.monotonic()
        except OSError:  # a kernel before 5.3, or a sandbox: mpiexec alone watches the ranks
            return
        else:
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def _forget(self, fd: int) -> None:
        del self._ranks[fd]
        self._poll.unregister(fd)
        os.close(fd)
