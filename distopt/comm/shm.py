"""The communicator of ranks that share a host, through shared memory. The work is done in `csrc/shm`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..errors import Process, UsageError
from ..launch.end_together.exit_guard import close_at_exit
from ..launch.job.base import Job
from ..launch.job.topology import Topology
from ..launch.rendezvous.host_group import HostGroup
from ..settings import Settings
from .base import DTYPES, Array, MessageWork, RaggedWork, Work
from .native import NativeCommunicator

_log = logging.getLogger("distopt")

# Ordinary arrays travel in chunks of this size: large enough to hide a synchronisation, small enough that the chunks
# in flight of all ranks stay in the cache.
CHUNK_BYTES = 512 << 10

Work.register(_core.ShmWork)  # written in C++ for speed
RaggedWork.register(_core.ShmRaggedWork)
MessageWork.register(_core.ShmMessage)


class ShmCommunicator(NativeCommunicator):
    """Collectives over the ranks of one host.

    Arrays from `empty` are reduced where they lie; others go through chunks in shared memory. `max` and `min` of
    floats give NaN if any rank has NaN.
    """

    core: _core.ShmCommunicator

    name = "shm"
    finds_nonfinite = True
    reduces_in_place = True

    def __init__(
        self,
        group: HostGroup,
        topology: Topology,
        settings: Settings | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        ranks: Sequence[int] | None = None,
        wire_of: ShmCommunicator | None = None,
    ) -> None:
        """Collective. The ranks of `group` share memory; they are the ranks of `topology`.

        Args:
            group: the ranks of this host.
            topology: theirs alone.
            settings: time-outs (default: from the environment).
            chunk_bytes: size of the chunks that ordinary arrays are sent in.
            ranks: numbers of the ranks in messages, if they are part of a larger job.
            wire_of: another communicator of the same ranks, whose wire memory is wire memory here, too.
        """
        self._settings = settings = settings or Settings.from_env()
        self._numbers = ranks or range(group.size)
        self.topology = topology
        processes = list(map(Process, self._numbers, topology.hosts, group.pids))
        fd = group.share_fd(lambda: _core.create_segment(group.size, chunk_bytes))
        self.core = _core.ShmCommunicator(
            fd, group.rank, processes, settings.timeout, settings.stall_warning, _log.warning
        )
        if wire_of is not None:
            self.core.use_wire_memory_of(wire_of.core)
        group.client.barrier()  # no peer may be reported missing before it has shown that it lives
        self.core.count_cores()

    @classmethod
    def create(cls, job: Job) -> ShmCommunicator:
        """Collective. The communicator of a job whose ranks share one host.

        Raises:
            UsageError: the ranks are on several hosts.
        """
        if not job.topology.single_host:
            raise UsageError("ranks on several hosts share no memory; choose transport mpi")
        communicator = cls(job.host_group(), job.topology)
        close_at_exit(communicator)
        return communicator

    def close(self) -> None:
        """Local. Leave; peers that still wait for this rank get a CommunicatorClosedError. Idempotent."""
        self.closed = True
        self.core.close()

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        array = self.core.empty(count, DTYPES[dtype], available_bytes() if self.topology.rank == 0 else 0)
        return array if count else np.empty(0, array.dtype)

    def _subgroup(self, ranks: Sequence[int], key: bytes) -> ShmCommunicator:
        place, size = ranks.index(self.topology.rank), len(ranks)
        group = HostGroup(key, place, size, self._settings.timeout)
        try:
            names = [self._numbers[rank] for rank in ranks]
            made = ShmCommunicator(
                group, Topology.of_one_host(place, size, self.topology.host), self._settings, ranks=names
            )
        finally:
            group.close()
        close_at_exit(made)
        return made

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        return self.core.start_message(sends, array, peer, tag, DTYPES[dtype])


def available_bytes() -> int:
    """Local. Bytes that the host can still give. Beyond them, the kernel kills processes rather than refuse memory."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError, IndexError):  # a sandbox; then all memory of the host
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:  # the limit of the container, where there is one
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        available = min(available, limit - int(used["anon"]) - int(used["shmem"]) - int(used["kernel"]))
    except (OSError, ValueError, KeyError):  # no such limit here
        pass
    return max(available, 0)
