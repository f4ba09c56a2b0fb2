"""The interface that every way of starting a job provides: the topology, and a small exchange of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...errors import LaunchError
from ..rendezvous.host_group import HostGroup
from .topology import Topology


class Job(ABC):
    """One rank's membership in a job. Communicators are built from it.

    The exchange methods are slow and meant for setup only: ids, fingerprints, versions; never training data.
    """

    topology: Topology
    _group: HostGroup | None = None
    _closed = False

    @abstractmethod
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. Give every rank the payload of every rank, in rank order; payloads may differ in length."""

    def host_group(self) -> HostGroup:
        """Collective among the ranks of this host on first use. The ranks that can share memory with this one."""
        self._check_open()
        if self._group is None:
            self._group = self._make_host_group()
        return self._group

    def close(self) -> None:
        """Local. Release sockets and handles; idempotent."""
        self._closed = True
        if self._group is not None:
            self._group.close()
            self._group = None

    # For subclasses.
    @abstractmethod
    def _make_host_group(self) -> HostGroup:
        """Make the group of this host."""

    def _check_open(self) -> None:
        if self._closed:
            raise LaunchError(f"rank {self.topology.rank} has closed its job; create a new one")
