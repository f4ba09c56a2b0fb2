"""Ranks that have ended, as the kernel and the network notice it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
from typing import ClassVar
from weakref import WeakValueDictionary

from ... import _core
from ...launch.processes import end_of

# Then a rank that has ended counts as lost. Messages that it sent before may arrive until then.
_PATIENCE_SECONDS = 0.5


class _End:
    """A file that is readable once a process has ended. A process has one for another, however many groups watch it."""

    known: ClassVar[WeakValueDictionary[int, _End]] = WeakValueDictionary()

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def of(cls, pid: int) -> _End | None:
        """Local. The file of the process with this id; None if only its launcher can watch it."""
        end = cls.known.get(pid)
        if end is None or wait([end.fd], 0):  # an earlier process had this id
            fd = end_of(pid)
            end = None if fd is None else cls(fd)
            if end is not None:
                cls.known[pid] = end
        return end


class LostPeers:
    """Notices ranks that have ended.

    A launcher may be slow to notice the end of a rank of this host, and the network may lose another host's.

    Args:
        pids: process ids of the other ranks of this host, by rank.
        transport: knows of ranks that it has lost.
    """

    def __init__(self, pids: Mapping[int, int], transport: _core.Transport) -> None:
        self._ended: dict[int, float] = {}  # rank: when it was noticed
        self._transport = transport
        self._ends = {rank: end for rank, pid in pids.items() if (end := _End.of(pid)) is not None}
        self._ranks = {end.fd: rank for rank, end in self._ends.items()}

    def lost(self, failed: Iterable[int]) -> int | None:
        """Local. A rank that was lost some time ago, or that has `failed` as it says itself; None if there is none."""
        now, ready = time.monotonic(), wait(self._ranks, 0)
        for fd in [fd for fd in self._ranks if fd in ready]:
            self._ended[self._ranks.pop(fd)] = now
        for rank in (*failed, *self._transport.lost):
            self._ended.setdefault(rank, now)
        return next((rank for rank, since in self._ended.items() if now - since > _PATIENCE_SECONDS), None)

    def close(self) -> None:
        """Local. Stop watching; idempotent."""
        self._ranks.clear()
        self._ends.clear()
        self._ended.clear()
