"""The number of ranks in a job, and their hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """This rank's place in the job.

    Attributes:
        rank: number of this process in the job, 0 ... world_size - 1.
        world_size: number of processes in the job.
        local_rank: number of this process among those on its host.
        local_size: number of processes on its host.
        hosts: host name of every rank, in rank order.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.hosts[self.rank]

    @property
    def single_host(self) -> bool:
        """Whether all ranks share one host."""
        return self.local_size == self.world_size

    @classmethod
    def of_one_host(cls, rank: int, world_size: int, host: str) -> Topology:
        """The topology of `world_size` ranks that all run on `host`."""
        return cls(rank, world_size, rank, world_size, (host,) * world_size)


def places_of(
    rank: int, identities: Sequence[str], hosts: Sequence[str]
) -> tuple[Topology, list[list[int]], list[int]]:
    """The topology of a rank; the ranks of each host, in the order of the first of them; and the ranks of its own host.

    Args:
        rank: this rank.
        identities: `host_identity` of every rank.
        hosts: host name of every rank.
    """
    ranks: dict[str, list[int]] = {}
    for peer, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(peer)
    local = ranks[identities[rank]]
    topology = Topology(rank, len(hosts), local.index(rank), len(local), tuple(hosts))
    return topology, list(ranks.values()), local


def host_identity() -> str:
    """An identity that is equal for two processes if and only if they can share memory.

    Neither the host name (cloned machines) nor the kernel (containers) is enough: abstract sockets need a common
    network namespace, and /proc/<pid> a common process namespace.
    """
    namespaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid")]
    return " ".join([socket.gethostname(), boot_id(), *namespaces])


def boot_id() -> str:
    """The identity of the machine since its last boot, the same in its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_of(identity: str) -> list[str]:
    """The part of a `host_identity` that is equal for processes that reach each other at the loopback address."""
    return identity.split(" ")[-3:-1]
