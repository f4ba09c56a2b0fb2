"""What every way of starting a job must answer: who am I, and how do a few bytes reach the others once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rendezvous import HostGroup
    from .topology import Topology

__all__ = ["Job"]


class Job(ABC):
    """One rank's membership in a job. Communicators are built from it.

    The exchange methods are slow and meant for set-up: ids, fingerprints, versions. Training data never goes here.
    """

    topology: Topology

    @abstractmethod
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. Give every rank the payload of every rank, in rank order; payloads may differ in length."""

    @abstractmethod
    def host_group(self) -> HostGroup:
        """Collective among the ranks of this host, on first use. The group that shares memory with this rank."""

    @abstractmethod
    def close(self) -> None:
        """Local. Release sockets and handles; idempotent."""
