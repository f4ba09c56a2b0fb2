"""The ranks of any process group of PyTorch, as checkpoints need them: who they are, and small messages to all."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..launch.topology import Topology


class GroupRanks:
    """The ranks of a process group, over distopt, Gloo, NCCL or another backend.

    Args:
        group: of this process (default: that of all ranks).

    Attributes:
        topology: this rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Collective."""
        self._group = group or dist.group.WORLD
        kinds = {device.type for device in self._group._device_types}
        self._device = torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        hosts = tuple(name.decode() for name in self.all_gather_bytes(socket.gethostname().encode()))
        self.topology = Topology(rank, size, hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]), hosts)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collective. The payload of every rank, in rank order; lengths may differ."""
        lengths = [int(length) for length in self._gather(torch.tensor([len(payload)]))]
        room = bytearray(payload.ljust(max(1, *lengths), b"\0"))
        parts = self._gather(torch.frombuffer(room, dtype=torch.uint8))
        return [part.numpy().tobytes()[:length] for part, length in zip(parts, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        own = tensor.to(self._device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, group=self._group)
        return [part.cpu() for part in parts]
