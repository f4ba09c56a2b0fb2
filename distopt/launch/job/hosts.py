"""Jobs of several hosts: the ranks meet at rank 0's server, and exchange their first bytes through it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from copy import copy
from functools import cache, partial
from typing import TypeVar

from ...errors import LaunchError
from ...settings import Settings
from ..end_together.parent import end_with_parent
from ..end_together.siblings import Absence
from ..launchers import LauncherInfo
from ..rendezvous.host_group import HostGroup
from ..rendezvous.key_value import KeyValueClient, RemoteClient
from ..rendezvous.meeting import Meeting
from ..rendezvous.member import Member
from ..threads import cap_threads, cores
from .base import Job
from .launched import leave_at_exit
from .multiprocess import Ticket
from .topology import host_identity, places_of

_Made = TypeVar("_Made", bound="HostsJob")


@cache
def meet(info: LauncherInfo, met: Meeting) -> Member:
    """Collective at the first call, then local. The other ranks end with this one from now on, and it with them.

    Args:
        info: the launcher's view of this process.
        met: how the ranks meet.

    Raises:
        LaunchError: a rank is missing or duplicated, or rank 0 cannot be reached.
    """
    member = Member(info, met, Settings.from_env().timeout)
    member.end_with_others()
    return member


class HostsJob(Job):
    """One rank of a job that torchrun, srun or `distopt run` started on several hosts.

    Collective.

    Args:
        info: the launcher's view of this process.
        met: how the ranks meet.

    Attributes:
        ranks_of_hosts: the ranks of each host, in the order of the first of them.
        local_ranks: the ranks of this host, this one included.
        numbers: the ranks' numbers for messages. A subgroup keeps the numbers of the whole job.
        endpoint: a host that all ranks reach, if one is known.

    Raises:
        LaunchError: a rank is missing or duplicated, or rank 0 cannot be reached.
    """

    _client: KeyValueClient
    numbers: tuple[int, ...]
    endpoint = ""

    def __init__(self, info: LauncherInfo, met: Meeting) -> None:
        self._settings = Settings.from_env()
        self.endpoint = met.address
        lifeline = meet(info, met)
        link = lifeline.client_link(self._settings.timeout)
        assert link is not None  # the first one of this lifeline
        self._client = self._client_over(link, info.rank, info.size)
        self._introduce(info.rank, host_identity(), socket.gethostname())
        end_with_parent(launched=True)
        leave_at_exit(lifeline)

    def _client_over(self, link: socket.socket, rank: int, size: int) -> RemoteClient:
        seconds = self._settings.timeout
        absence = partial(Absence, min(self._settings.stall_warning, seconds / 2))
        return RemoteClient(link, rank, range(size), seconds, "the server of rank 0", absence=absence)

    def _introduce(self, rank: int, identity: str, host: str) -> None:
        """Collective. Learn where the ranks are."""
        ticket = Ticket()
        mine = [identity, host, sorted(cores()), ticket.secret.hex()]
        try:
            identities, hosts, usable, secrets = zip(*self.exchange(mine), strict=True)
        except (ValueError, TypeError):
            raise LaunchError("a rank has introduced itself differently; use one version of distopt") from None
        self._take_places(rank, identities, hosts)
        self.numbers = tuple(range(len(hosts)))
        local = self.local_ranks
        self._ticket = Ticket(bytes.fromhex(secrets[local[0]]))
        cap_threads(len(local), [usable[peer] for peer in local])

    def _take_places(self, rank: int, identities: Sequence[str], hosts: Sequence[str]) -> None:
        self._identities = identities
        self.topology, self.ranks_of_hosts, self.local_ranks = places_of(rank, identities, hosts)

    def subgroup(self: _Made, ranks: Sequence[int], key: bytes) -> _Made:
        """Collective among `ranks`, which have all come. A job of these ranks alone, in that order.

        Args:
            ranks: this rank and others, each once; equal on all of them.
            key: 16 secret bytes that they have in common.
        """
        self.check_open()
        made = copy(self)
        made.numbers = tuple(self.numbers[rank] for rank in ranks)
        identities, hosts = ([values[rank] for rank in ranks] for values in (self._identities, self.topology.hosts))
        made._take_places([*ranks].index(self.topology.rank), identities, hosts)
        made._ticket = Ticket(hashlib.sha256(key + b"%d" % made.local_ranks[0]).digest()[:16])
        name = hashlib.sha256(b"distopt keys " + key).hexdigest()[:16]
        made._client = self._client.within(name, [self._client.ranks[rank] for rank in ranks])
        made._group = None
        return made

    def client(self) -> KeyValueClient:
        """Local here. The key-value client: through the server of rank 0."""
        return self._client

    def _make_host_group(self) -> HostGroup:
        topology, settings = self.topology, self._settings
        absence = Absence(settings.stall_warning, all_started=True)
        return HostGroup(self._ticket.secret, topology.local_rank, topology.local_size, settings.timeout, absence)

    def close(self) -> None:
        """Leave the job; idempotent."""
        super().close()
        self._client.close()
