"""Ranks that have ended, as the kernel and the network notice it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait

from ... import _core
from ...launch.processes import end_of

# Then a rank that has ended counts as lost. Messages that it sent before may arrive until then.
_PATIENCE_SECONDS = 0.5


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
        ends = {rank: end_of(pid) for rank, pid in pids.items()}
        self._ranks = {end: rank for rank, end in ends.items() if end is not None}  # else only the launcher watches it

    def lost(self, failed: Iterable[int]) -> int | None:
        """Local. A rank that was lost some time ago, or that has `failed` as it says itself; None if there is none."""
        now, ready = time.monotonic(), wait(self._ranks, 0)
        for fd in [fd for fd in self._ranks if fd in ready]:
            self._ended[self._ranks.pop(fd)] = now
            os.close(fd)
        for rank in (*failed, *self._transport.lost):
            self._ended.setdefault(rank, now)
        return next((rank for rank, since in self._ended.items() if now - since > _PATIENCE_SECONDS), None)

    def close(self) -> None:
        """Local. Stop watching; idempotent."""
        while self._ranks:
            os.close(self._ranks.popitem()[0])
        self._ended.clear()
