"""The interfaces that a communicator over hosts needs: of the network, and of the job whose ranks it connects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ... import _core
from ...launch.job.topology import Topology
from ...launch.rendezvous.host_group import HostGroup
from ..base import Communicator


class Peers(Protocol):
    """A job, for this room."""

    @property
    def topology(self) -> Topology:
        """Local. The topology of its ranks."""

    @property
    def numbers(self) -> Sequence[int]:
        """Local. The ranks' numbers for messages."""

    @property
    def local_ranks(self) -> Sequence[int]:
        """Local. The ranks of this host."""

    @property
    def ranks_of_hosts(self) -> Sequence[Sequence[int]]:
        """Local. The ranks of each host, in the order of the first of them."""

    def check_open(self) -> None:
        """Local. Raise a LaunchError if the job has ended for this rank."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in the order of the ranks; lengths may differ."""

    def exchange(self, value: Any) -> list[Any]:
        """Collective. The value of JSON of every rank, in the order of the ranks."""

    def host_group(self) -> HostGroup:
        """Collective among the ranks of this host on first use. The group in which they share memory."""


class Network(Protocol):
    """Transports between the ranks of one job.

    Attributes:
        chunk_bytes: the size of messages that carries large arrays best.
        is_far: whether a message between some of the ranks takes long, even a short one.
    """

    chunk_bytes: int
    is_far: bool

    @property
    def has_ended(self) -> bool:
        """Local. Whether nothing can be sent any more."""

    def open(self) -> _core.Transport:
        """Collective. A new transport between all ranks."""

    def close(self, read_last: Callable[[], object], *, idle: bool) -> None:
        """Local. Give back what the transports use.

        Args:
            read_last: reads the notes of ranks that leave, for a moment.
            idle: whether nothing is under way; else the library may still write to the memory of messages.
        """

    def subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        """Collective among `ranks`. Their communicator; see `MpiJob.subgroup`."""
