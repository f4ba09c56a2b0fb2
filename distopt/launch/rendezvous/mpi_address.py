"""The one message that MPI carries for the set-up of a job: where rank 0's server listens."""

from __future__ import annotations

import math
import time
from typing import Any

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.siblings import Absence
from ..stopwatch import Stopwatch
from ..words import ranks_of, waits_for
from .key_value import LOOK_SECONDS

_TAG = 17_185  # the communicator is one that the user may also use
ADDRESS_BYTES = 2048


def share_address(mpi: Any, comm: Any, address: bytes, settings: Settings) -> bytes:
    """Collective over `comm`. The address that rank 0 gives.

    MPI's own collectives cannot be cancelled and do not report which rank is missing. This therefore polls for one
    message of known length. Nothing that a peer sends is unpickled.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: an intracommunicator.
        address: on rank 0, at most `ADDRESS_BYTES`.
        settings: timeout, and delay of the warning.

    Raises:
        LaunchError: a rank did not take part in time; the message names it.
    """
    buffer = bytearray(address.ljust(ADDRESS_BYTES))
    message, others = [buffer, mpi.BYTE], range(1, comm.size)
    if comm.rank == 0:
        requests = {rank: comm.Isend(message, rank, _TAG) for rank in others}
    else:
        requests = {0: comm.Irecv(message, 0, _TAG)}
    clock, absence = Stopwatch(), Absence(min(settings.stall_warning, settings.timeout / 2))
    look_at = 0.0
    while requests := {rank: request for rank, request in requests.items() if not request.Test()}:
        waited, who = clock.seconds(), waits_for(comm.rank, ranks_of(list(requests), comm.size))
        if waited > settings.timeout:
            for request in requests.values():
                request.Cancel()
            raise LaunchError(f"{who}, for {waited:.1f} s; see the output of those processes")
        if waited > look_at:
            look_at = waited + LOOK_SECONDS
            # MPI_Finalize is collective: no rank ends well before all have met, however many are left.
            absence.check(who, math.inf, patience=LOOK_SECONDS / 2)
        time.sleep(min(1e-3, waited / 8))
    return bytes(buffer).rstrip()
