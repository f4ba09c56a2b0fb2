"""Jobs of one or several hosts: MPI connects the ranks, and carries the address of rank 0's server."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, TypeVar

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.exit_guard import guard
from ..end_together.lifeline import Lifeline, reach
from ..gate import FOR_KEYS
from ..rendezvous.key_value import KeyValueClient, client_alone
from ..rendezvous.mpi import check_launcher, import_mpi, start_mpi
from ..rendezvous.mpi_address import share_address
from ..stopwatch import GRACE_SECONDS
from .hosts import HostsJob
from .offer import Offer, start
from .topology import host_identity

_SOURCE = "the address that MPI has carried"
_Made = TypeVar("_Made", bound="MpiJob")


class MpiJob(HostsJob):
    """One rank of a job started by an MPI launcher; without a launcher, a job of one rank.

    Collective over `comm`.

    Args:
        comm: an mpi4py intracommunicator (default: COMM_WORLD). The job uses its own duplicate.
        host: replaces the identity of this rank's host. Ranks with the same identity share memory.

    Attributes:
        comm: the duplicate, used for setup traffic.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: launcher and MPI library disagree about the size of the job.
    """

    def __init__(self, comm: Any = None, *, host: str | None = None) -> None:
        MPI = start_mpi()
        check_launcher(MPI)
        parent = MPI.COMM_WORLD if comm is None else comm
        self._settings = Settings.from_env()
        self._client, lifeline = self._meet(MPI, parent, is_world=comm is None)
        self._introduce(parent.rank, host or host_identity(), host or socket.gethostname())
        self.comm: Any = parent.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        size = self.comm.size
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
        return self._client_over(link, rank, size), lifeline

    def _share_offer(self, mpi: Any, comm: Any, *, end_together: bool) -> Offer:
        content = b""
        if comm.rank == 0:
            try:
                seconds, ports = self._settings.timeout + GRACE_SECONDS, self._settings.ports
                _, content = start(comm.size, seconds, end_together=end_together, ports=ports)
            except OSError as error:
                content = json.dumps(str(error)).encode()
        content = share_address(mpi, comm, content, self._settings)
        try:
            return Offer.of(content)
        except ValueError:
            raise LaunchError(f"rank 0 cannot start the server of the job: {content.decode()}") from None

    def subgroup(self: _Made, ranks: Sequence[int], key: bytes) -> _Made:
        """Collective among `ranks`, which have all come. A job with an MPI communicator of its own."""
        made = super().subgroup(ranks, key)
        made.comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        made.comm.Set_errhandler(import_mpi().ERRORS_RETURN)
        return made

    def client(self) -> KeyValueClient:
        """Local here. The key-value client: through the server of rank 0."""
        start_mpi()  # refuses after MPI_Finalize, which has closed the job
        return self._client

    def close(self) -> None:
        """Leave the job; idempotent. MPI itself remains initialized until the interpreter ends."""
        guard.closed(self)
        super().close()
        if self.comm is not None and not import_mpi().Is_finalized():
            self.comm.Free()
        self.comm = None
