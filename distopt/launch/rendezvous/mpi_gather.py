"""The first exchange of bytes over MPI: through rank 0, always with a timeout."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.siblings import Absence
from ..stopwatch import GRACE_SECONDS, Stopwatch
from .host_group import MAX_BYTES, check_length, pack, unpack

_TAG = 17_185  # the first exchange uses a communicator that the user may also use
# Time between two looks at this host's processes. An end counts if seen twice: mpiexec may be ending all ranks.
_LOOK_SECONDS = 0.3


def all_gather(mpi: Any, comm: Any, payload: bytes, settings: Settings) -> list[bytes]:
    """Collective over `comm`. The payload of every rank, in rank order; lengths may differ.

    MPI's own collectives cannot be cancelled and do not report which rank is missing. This therefore polls for
    point-to-point messages of known length. Nothing that a peer sends is unpickled.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: an intracommunicator.
        payload: at most 16 MiB.
        settings: timeout, and delay of the warning.

    Raises:
        LaunchError: a rank did not take part in time; the message names it.
    """
    check_length(payload)
    if comm.size == 1:
        return [payload]
    if comm.rank != 0:
        _send(mpi, comm, settings, payload, [0], settings.timeout)
        message = _receive(mpi, comm, settings, [0], settings.timeout + GRACE_SECONDS)[0]
        return unpack(message, comm.size)
    others = range(1, comm.size)
    received = _receive(mpi, comm, settings, others, settings.timeout)
    payloads = [payload, *(received[rank] for rank in others)]
    _send(mpi, comm, settings, pack(payloads), others, settings.timeout)
    return payloads


def _send(mpi: Any, comm: Any, settings: Settings, message: bytes, ranks: Sequence[int], seconds: float) -> None:
    requests = {rank: comm.Isend([message, mpi.BYTE], rank, _TAG) for rank in ranks}
    wait = _Wait(comm, settings, seconds)
    while requests:
        requests = {rank: request for rank, request in requests.items() if not request.Test()}
        wait.step(list(requests))


def _receive(mpi: Any, comm: Any, settings: Settings, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
    status = mpi.Status()
    received: dict[int, bytes] = {}
    absent = list(ranks)
    wait = _Wait(comm, settings, seconds)
    while absent:
        for rank in absent:
            message = comm.Improbe(rank, _TAG, status)
            if message is not None:
                count = status.Get_count(mpi.BYTE)
                if not 0 <= count <= MAX_BYTES * comm.size:
                    raise LaunchError(
                        f"rank {rank} sent a message that cannot be read; use the same version of distopt everywhere"
                    )
                buffer = bytearray(count)
                message.Recv([buffer, mpi.BYTE])
                received[rank] = bytes(buffer)
        absent = [rank for rank in absent if rank not in received]
        wait.step(absent)
    return received


class _Wait:
    """A wait for other ranks: sleeps, warns once, and raises on timeout."""

    def __init__(self, comm: Any, settings: Settings, seconds: float) -> None:
        self._comm = comm
        self._seconds = seconds
        self._clock = Stopwatch()
        self._absence = Absence(min(settings.stall_warning, seconds / 2))
        self._look_at = 0.0

    def step(self, absent: Sequence[int]) -> None:
        """Local. Sleep a moment, if ranks are absent; raise a LaunchError if they have ended or are too late."""
        if not absent:
            return
        waited = self._clock.seconds()
        noun = "ranks" if len(absent) > 1 else "rank"
        who = (
            f"rank {self._comm.rank} (pid {os.getpid()}) waits in the set-up of the job for {noun} "
            f"{', '.join(map(str, absent))} of {self._comm.size}"
        )
        if waited > self._seconds:
            raise LaunchError(f"{who}, for {waited:.1f} s; see the output of those processes")
        if waited > self._look_at:
            self._look_at = waited + _LOOK_SECONDS
            # MPI_Finalize is collective: no rank ends well before all have met, however many are left.
            self._absence.check(who, math.inf, patience=_LOOK_SECONDS / 2)
        time.sleep(min(1e-3, waited / 8))
