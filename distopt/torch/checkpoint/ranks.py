"""The ranks of any process group of PyTorch, for checkpoints: their topology, and a gather of small messages."""

from __future__ import annotations

import socket

import torch.distributed as dist

from ...launch.job.topology import Topology


class GroupRanks:
    """The ranks of a process group, over distopt, Gloo, NCCL or another backend.

    Args:
        group: a group with this process (default: all ranks).

    Attributes:
        topology: of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Collective."""
        self._group = group or dist.group.WORLD
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        hosts = tuple(name.decode() for name in self.all_gather_bytes(socket.gethostname().encode()))
        self.topology = Topology(rank, size, hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]), hosts)

    def all_gather_bytes(self, payload: bytes, *, label: str = "") -> list[bytes]:
        """Collective. The payload of every rank, in rank order; PyTorch's messages have no label."""
        payloads = [b""] * dist.get_world_size(self._group)
        dist.all_gather_object(payloads, payload, group=self._group)
        return payloads
