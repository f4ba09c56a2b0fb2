"""Jobs of one or several hosts: MPI connects the ranks, and carries the address of rank 0's server."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.exit_guard import guard
from ..end_together.lifeline import Lifeline, reach
from ..end_together.siblings import Absence
from ..gate import FOR_KEYS
from ..rendezvous.host_group import HostGroup
from ..rendezvous.key_value import KeyValueClient, RemoteClient, client_alone
from ..rendezvous.mpi import check_launcher, import_mpi, start_mpi
from ..rendezvous.mpi_address import share_address
from ..stopwatch import GRACE_SECONDS
from ..threads import cap_threads, cores
from .base import Job
from .multiprocess import Ticket
from .offer import Offer, start
from .topology import host_identity, places_of

_SOURCE = "the address that MPI has carried"


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
        self._client, lifeline = self._meet(MPI, parent, is_world=comm is None)
        try:
            identities, hosts, usable, secrets = zip(*self.exchange(mine), strict=True)
        except (ValueError, TypeError):
            raise LaunchError("a rank has introduced itself differently; use one version of distopt") from None
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
        if lifeline is not None:
            lifeline.speaks = self.topology.local_rank == 0
            lifeline.end_with_others(guard.abort)

    def _meet(self, mpi: Any, comm: Any, *, is_world: bool) -> tuple[KeyValueClient, Lifeline | None]:
        """Collective over `comm`. The client of this rank, and its lifeline if it is a new one."""
        rank, size, seconds = comm.rank, comm.size, self._settings.timeout
        if size == 1:
            return client_alone(seconds), None
        lifeline, link = None, None
        if is_world and guard.others is None:
            offer = self._share_offer(mpi, comm, end_together=True)
            lifeline = guard.others = Lifeline(rank, size, offer.key, offer.addresses, seconds, source=_SOURCE)
        if is_world and guard.others is not None:
            link = guard.others.client_link(seconds)
        if link is None:
            offer = self._share_offer(mpi, comm, end_together=False)
            link = reach(offer.addresses, offer.key, FOR_KEYS, rank, size, seconds, _SOURCE)
        limit = min(self._settings.stall_warning, seconds / 2)
        return RemoteClient(
            link, rank, range(size), seconds, "the server of rank 0", absence=partial(Absence, limit)
        ), lifeline

    def _share_offer(self, mpi: Any, comm: Any, *, end_together: bool) -> Offer:
        content = b""
        if comm.rank == 0:
            try:
                _, content = start(comm.size, self._settings.timeout + GRACE_SECONDS, end_together=end_together)
            except OSError as error:
                content = json.dumps(str(error)).encode()
        content = share_address(mpi, comm, content, self._settings)
        try:
            return Offer.of(content)
        except ValueError:
            raise LaunchError(f"rank 0 cannot start the server of the job: {content.decode()}") from None

    def _take_places(self, rank: int, identities: Sequence[str], hosts: Sequence[str]) -> None:
        self._identities = identities
        self.topology, self.ranks_of_hosts, self.local_ranks = places_of(rank, identities, hosts)

    def subgroup(self, ranks: Sequence[int], key: bytes) -> MpiJob:
        """Collective among `ranks`, which have all come. A job of these ranks alone, in that order.

        Args:
            ranks: this rank and others, each once; equal on all of them.
            key: 16 secret bytes that they have in common.
        """
        self._check_open()
        made = copy(self)
        made.comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        made.comm.Set_errhandler(import_mpi().ERRORS_RETURN)
        made.numbers = tuple(self.numbers[rank] for rank in ranks)
        identities, hosts = ([values[rank] for rank in ranks] for values in (self._identities, self.topology.hosts))
        made._take_places(made.comm.rank, identities, hosts)
        made._ticket = Ticket(hashlib.sha256(key + b"%d" % made.local_ranks[0]).digest()[:16])
        name = hashlib.sha256(b"distopt keys " + key).hexdigest()[:16]
        made._client = self._client.within(name, [self._client.ranks[rank] for rank in ranks])
        made._group = None
        return made

    def client(self) -> KeyValueClient:
        """Local here. See `Job.client`; through the server of rank 0."""
        start_mpi()  # refuses after MPI_Finalize, which has closed the job
        return self._client

    def _make_host_group(self) -> HostGroup:
        topology, settings = self.topology, self._settings
        absence = Absence(settings.stall_warning, all_started=True)
        return HostGroup(self._ticket.secret, topology.local_rank, topology.local_size, settings.timeout, absence)

    def close(self) -> None:
        """Leave the job; idempotent. MPI itself remains initialized until the interpreter ends."""
        guard.closed(self)
        super().close()
        self._client.close()
        if self.comm is not None and not import_mpi().Is_finalized():
            self.comm.Free()
        self.comm = None
