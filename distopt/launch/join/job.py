"""The interface that every way of starting a job provides: the topology, and a small exchange of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..topology import Topology
from .rendezvous import HostGroup


class Job(ABC):
    """One rank's membership in a job. Communicators are built from it.

    The exchange methods are slow and meant for setup only: ids, fingerprints, versions; never training data.
    """

    topology: Topology

    @abstractmethod
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. Give every rank the payload of every rank, in rank order; payloads may differ in length."""

    @abstractmethod
    def host_group(self) -> HostGroup:
        """Collective among the ranks of this host on first use. The ranks that can share memory with this one."""

    @abstractmethod
    def close(self) -> None:
        """Local. Release sockets and handles; idempotent."""
