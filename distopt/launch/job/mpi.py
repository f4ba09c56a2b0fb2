"""Jobs of one or several hosts: MPI connects the ranks."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from copy import copy
from typing import Any

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.exit_guard import guard
from ..end_together.siblings import Absence
from ..rendezvous.host_group import HostGroup
from ..rendezvous.mpi import check_launcher, import_mpi, start_mpi
from ..rendezvous.mpi_gather import all_gather
from ..threads import cap_threads, cores
from .base import Job
from .multiprocess import Ticket
from .topology import host_identity, places_of
from .watched import watch_ranks


class MpiJob(Job):
    """One rank of a job started by an MPI launcher; without a launcher, a job of one rank.

    Collective over `comm`.

    Args:
        comm: an mpi4py intracommunicator (default: COMM_WORLD). The job uses its own duplicate.
        host: replaces the identity of this rank's host. Ranks with the same identity share memory.

    Attributes:
        comm: the duplicate, used for setup traffic.
        ranks_of_hosts: the ranks of each host, in the order of the first of them.
        local_ranks: the ranks of this host, this one included.
        numbers: the ranks' numbers for messages. A subgroup keeps the numbers of the whole job.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: launcher and MPI library disagree about the size of the job.
    """

    def __init__(self, comm: Any = None, *, host: str | None = None) -> None:
        MPI = start_mpi()
        check_launcher(MPI)
        parent = MPI.COMM_WORLD if comm is None else comm
        self._settings = Settings.from_env()
        ticket = Ticket()
        mine = [host or host_identity(), host or socket.gethostname(), sorted(cores()), ticket.secret.hex()]
        packed = all_gather(MPI, parent, json.dumps(mine).encode(), self._settings)
        identities, hosts, usable, secrets = zip(*map(_introduction, range(len(packed)), packed), strict=True)
        self.comm: Any = parent.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        rank, size = self.comm.rank, self.comm.size
        self._take_places(rank, identities, hosts)
        self.numbers = tuple(range(size))
        local = self.local_ranks
        self._ticket = Ticket(bytes.fromhex(secrets[local[0]]))
        cap_threads(len(local), [usable[peer] for peer in local])
        if size > 1:
            guard.joined(self)
        if comm is None and size > 1 and guard.others is None:
            guard.others = watch_ranks(self, self._settings.timeout)
            if guard.others is not None:
                guard.others.end_with_others(guard.abort)

    def _take_places(self, rank: int, identities: Sequence[str], hosts: Sequence[str]) -> None:
        self._identities = identities
        self.topology, self.ranks_of_hosts, self.local_ranks = places_of(rank, identities, hosts)

    def subgroup(self, ranks: Sequence[int], secret: bytes) -> MpiJob:
        """Collective among `ranks`, which have all come. A job of these ranks alone, in that order.

        Args:
            ranks: this rank and others, each once; equal on all of them.
            secret: 16 bytes that they have in common.
        """
        self._check_open()
        made = copy(self)
        made.comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        made.comm.Set_errhandler(import_mpi().ERRORS_RETURN)
        made.numbers = tuple(self.numbers[rank] for rank in ranks)
        identities, hosts = ([values[rank] for rank in ranks] for values in (self._identities, self.topology.hosts))
        made._take_places(made.comm.rank, identities, hosts)
        made._ticket = Ticket(hashlib.sha256(secret + b"%d" % made.local_ranks[0]).digest()[:16])
        made._group = None
        return made

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. See `Job.all_gather`."""
        self._check_open()
        return all_gather(start_mpi(), self.comm, payload, self._settings)

    def _make_host_group(self) -> HostGroup:
        topology, settings = self.topology, self._settings
        absence = Absence(settings.stall_warning, all_started=True)
        return HostGroup(self._ticket.secret, topology.local_rank, topology.local_size, settings.timeout, absence)

    def close(self) -> None:
        """Local. Leave the job; idempotent. MPI itself remains initialized until the interpreter ends."""
        guard.closed(self)
        super().close()
        if self.comm is not None and not import_mpi().Is_finalized():
            self.comm.Free()
        self.comm = None


def _introduction(rank: int, data: bytes) -> tuple[str, str, list[int], str]:
    """Identity and name of the host of a rank, its cores, and a secret for the ranks of that host."""
    try:
        identity, host, usable, secret = json.loads(data)
    except (ValueError, TypeError):
        raise LaunchError(
            f"rank {rank} sent an introduction that cannot be read; install the same version of distopt everywhere"
        ) from None
    return identity, host, usable, secret
