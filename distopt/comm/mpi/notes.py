"""Small messages between ranks that wait long or leave, so that the others can name the ranks they wait for."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

_FAREWELL_SECONDS = 1.0  # then a rank that exits stops waiting for the others to close their communicators
_WAITING = -1  # in place of the number of collectives that a leaving rank has finished


class MpiNotes:
    """One rank's notes to and from the others.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: an MPI communicator that carries nothing else.

    Attributes:
        waiting: when a rank was last heard to wait, on the clock of `time.monotonic`, by rank.
        closed: by rank, the number of collectives that it had finished when it closed.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sent: list[Any] = []  # requests, with the memory that they read
        self.waiting: dict[int, float] = {}
        self.closed: dict[int, int] = {}

    def send(self, finished: int = _WAITING) -> None:
        """Local. Send all others a note: this rank waits, or it leaves after `finished` collectives."""
        note = np.array([finished], np.int64)
        others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
        self._sent += [(self._comm.Isend([note, self._mpi.INT64_T], rank), note) for rank in others]

    def read(self) -> bool:
        """Local. Read the notes that have arrived; return whether one says that a rank waits."""
        asked = False
        status = self._mpi.Status()
        note = np.empty(1, np.int64)
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            self._comm.Recv([note, self._mpi.INT64_T], status.source)
            if note[0] == _WAITING:
                self.waiting[status.source] = time.monotonic()
                asked = True
            else:
                self.closed[status.source] = int(note[0])
        return asked

    def read_last(self) -> None:
        """Local. Read the notes of ranks that leave, for a moment: UCX warns of messages that were never received."""
        end = time.monotonic() + _FAREWELL_SECONDS
        while len(self.closed) < self._comm.size - 1 and time.monotonic() < end:
            self.read()
            time.sleep(1e-4)
