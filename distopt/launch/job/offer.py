"""How ranks that can already exchange a message come to the server of their job, which rank 0 starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
from dataclasses import dataclass

from ...errors import LaunchError
from ..addresses import LOOPBACK, PORTS_TAKEN, own_addresses
from ..end_together.lifeline import Lifeline, start_server
from ..sockets import listen_at_one_of
from .base import Job
from .topology import host_identity, network_of

_JOIN_SECONDS = 5.0  # then a rank gives up its lifeline, which the job can do without
_MOST_ADDRESSES = 32  # the message has a limit under mpiexec
_log = logging.getLogger("distopt")


@dataclass(frozen=True)
class Offer:
    """The key and the addresses of the server.

    Attributes:
        key: proves membership.
        addresses: hosts and ports at which it may be reached.
    """

    key: bytes
    addresses: list[tuple[str, int]]

    @classmethod
    def of(cls, content: bytes) -> Offer:
        """The offer in a message of `start`; raises a ValueError if rank 0 has started no server."""
        key, port, identity, hosts = json.loads(content)
        if network_of(identity) == network_of(host_identity()):
            hosts = [LOOPBACK]
        return cls(bytes.fromhex(key), [(host, port) for host in hosts])


def start(
    size: int, timeout: float, *, end_together: bool = True, ports: range | None = None
) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start the server, on rank 0, and describe it in a message for the others.

    Args:
        size: number of ranks.
        timeout: seconds that they may be late.
        end_together: see `start_server`.
        ports: where it may listen (default: anywhere).

    Raises:
        OSError: a limit is reached, or all ports are taken.
    """
    listener = listen_at_one_of(ports or (0,), 2 * size + 16)  # 0: the system's choice
    if listener is None:
        raise OSError(PORTS_TAKEN)
    with listener:
        key = os.urandom(32)
        server = start_server(listener, key, size, timeout, end_together=end_together)
        offer = [key.hex(), listener.getsockname()[1], host_identity(), own_addresses()[:_MOST_ADDRESSES]]
        return server, json.dumps(offer).encode()


def connect_lifelines(job: Job, timeout: float) -> Lifeline | None:
    """Collective. A lifeline for each rank of a job of one host; None if TCP does not connect them all.

    Args:
        job: the job.
        timeout: seconds that ranks may be late.
    """
    topology, offer, server, lifeline = job.topology, b"", None, None
    if topology.rank == 0:
        with contextlib.suppress(OSError):  # a limit is reached
            server, offer = start(topology.world_size, timeout)
    offer = job.all_gather(offer)[0]
    with contextlib.suppress(LaunchError, ValueError):  # rank 0 cannot be reached; it has offered nothing
        found = Offer.of(offer)
        lifeline = Lifeline(
            topology.rank,
            topology.world_size,
            found.key,
            found.addresses,
            _JOIN_SECONDS,
            speaks=topology.local_rank == 0,
        )
    unconnected = [str(rank) for rank, connected in enumerate(job.exchange(lifeline is not None)) if not connected]
    if not unconnected and lifeline is not None:
        return lifeline
    if lifeline is not None:
        lifeline.close()
    if server is not None:
        server.kill()
    if topology.rank == 0:
        _log.warning(
            "rank %s cannot reach rank 0 by TCP; the loss of a rank may be noticed only after DISTOPT_TIMEOUT",
            ", ".join(unconnected),
        )
    return None
