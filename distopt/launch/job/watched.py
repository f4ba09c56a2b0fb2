"""How the ranks of a job come to watch each other, once they can exchange bytes."""

from __future__ import annotations

import contextlib
import json
import logging
import os

from ...errors import LaunchError
from ..addresses import own_addresses
from ..end_together.watch import Watch, start_server
from ..sockets import listen
from .base import Job

_JOIN_SECONDS = 5.0  # then a rank gives up joining the watch, which the job can do without
_log = logging.getLogger("distopt")


def watch_ranks(job: Job, timeout: float) -> Watch | None:
    """Collective. A watch for each rank of a job; None if TCP does not connect them all.

    Args:
        job: the job.
        timeout: seconds that ranks may be late.
    """
    topology, offer, server = job.topology, b"", None
    if topology.rank == 0:
        with contextlib.suppress(OSError), listen(0, 2 * topology.world_size + 16) as listener:  # a limit is reached
            key = os.urandom(32)
            server = start_server(listener, key, topology.world_size, timeout)
            offer = json.dumps([key.hex(), listener.getsockname()[1], own_addresses()]).encode()
    offer = job.all_gather(offer)[0]
    watch = None
    with contextlib.suppress(LaunchError, ValueError):  # rank 0 cannot be reached; it has offered nothing
        secret, port, addresses = json.loads(offer)
        local = topology.single_host or topology.rank == 0
        hosts = ["localhost"] if local else addresses
        watch = Watch(
            topology.rank,
            topology.world_size,
            bytes.fromhex(secret),
            [(host, port) for host in hosts],
            _JOIN_SECONDS,
            speaks=topology.local_rank == 0,
        )
    unwatched = [str(r) for r, connected in enumerate(job.all_gather(b"" if watch is None else b"1")) if not connected]
    if not unwatched and watch is not None:
        watch.server = server
        return watch
    if watch is not None:
        watch.close()
    if server is not None:
        server.kill()
    if topology.rank == 0:
        _log.warning(
            "rank %s cannot reach rank 0 by TCP; the loss of a rank may be noticed only after DISTOPT_TIMEOUT",
            ", ".join(unwatched),
        )
    return None
