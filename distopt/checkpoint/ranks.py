"""The ranks of a job, as checkpoints need them."""

from __future__ import annotations

from typing import Protocol

from ..launch.topology import Topology


class Ranks(Protocol):
    """A communicator is such."""

    topology: Topology

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ."""
