"""The members of a trial as a job, from which their communicator is made."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ...errors import LaunchError
from ..job.base import Job
from ..job.topology import host_identity, places_of
from ..rendezvous.host_group import HostGroup
from .client import MembersClient, WorkersClient


class MembersJob(Job):
    """This worker among the members of a trial; each is one rank.

    Collective.

    Args:
        client: of this worker.
        epoch: of the members.
        members: their numbers, in the order of the ranks.
        seconds: how long an exchange waits for a member.

    Attributes:
        numbers: the argument `members`.
        ranks_of_hosts: the ranks of each host, in the order of the first of them.
        local_ranks: those of this host.

    Raises:
        LaunchError: a member has ended, or the trial has been aborted.
    """

    def __init__(self, client: WorkersClient, epoch: int, members: Sequence[int], seconds: float) -> None:
        self._workers, self.numbers = client, members
        self._client = MembersClient(client, epoch, members, seconds)
        identities, hosts = zip(*self.exchange([host_identity(), socket.gethostname()]), strict=True)
        rank = [*members].index(client.number)
        self.topology, self.ranks_of_hosts, self.local_ranks = places_of(rank, identities, hosts)

    def client(self) -> MembersClient:
        """Local here. The key-value client: through the service."""
        return self._client

    def check_open(self) -> None:
        """Raise a LaunchError if the job is closed, or the trial has been aborted, which ends all waits."""
        super().check_open()
        if self._workers.trial is None:
            raise LaunchError("the trial has been aborted")

    def _make_host_group(self) -> HostGroup:
        raise LaunchError("workers share no memory")
