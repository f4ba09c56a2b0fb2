"""The interface that every way of starting a job provides: the topology, and a small exchange of bytes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from ...errors import LaunchError
from ..rendezvous.host_group import HostGroup
from ..rendezvous.key_value import KeyValueClient
from .topology import Topology


class Job(ABC):
    """One rank's membership in a job. Communicators are built from it.

    The exchange methods are slow and meant for setup only: ids, fingerprints, versions; never training data.
    """

    topology: Topology
    _group: HostGroup | None = None
    _closed = False

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. Give every rank the payload of every rank, in rank order; payloads may differ in length.

        Raises:
            LaunchError: a rank ended or did not take part in time; the message names it.
        """
        self.check_open()
        return self.client().all_gather(payload)

    def exchange(self, value: Any) -> list[Any]:
        """Collective. The value of JSON of every rank, in rank order; see `all_gather`.

        Raises:
            LaunchError: a rank has sent something else, too.
        """
        payloads = self.all_gather(json.dumps(value).encode())
        try:
            return [json.loads(payload) for payload in payloads]
        except (ValueError, RecursionError):
            raise LaunchError(
                "a rank sent a note that cannot be read; install the same version of distopt everywhere"
            ) from None

    def client(self) -> KeyValueClient:
        """Collective on first use. Exchanges bytes with the other ranks by key; here through rank 0 of their host."""
        return self.host_group().client

    def host_group(self) -> HostGroup:
        """Collective among the ranks of this host on first use. The ranks that can share memory with this one."""
        self.check_open()
        if self._group is None:
            self._group = self._make_host_group()
        return self._group

    def close(self) -> None:
        """Release sockets and handles; idempotent."""
        self._closed = True
        if self._group is not None:
            self._group.close()
            self._group = None

    # For subclasses.
    @abstractmethod
    def _make_host_group(self) -> HostGroup:
        """Make the group of this host."""

    def check_open(self) -> None:
        """Local. Raise a LaunchError if this process has closed the job."""
        if self._closed:
            raise LaunchError(f"rank {self.topology.rank} has closed its job; create a new one")
