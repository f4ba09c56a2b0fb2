"""Collectives over a network, for ranks on several hosts.

The description of a collective travels with its data, so that ranks with different collectives raise errors, and
neither corrupt data nor wait forever. The network moves bytes only: the sums are ours, in rank order, because the order
of MPI_Allreduce is the library's own choice. csrc/net does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ... import _core
from ...errors import CommunicatorError, WireMemoryError
from ...launch.end_together.exit_guard import close_at_exit
from ...settings import Settings
from ..base import Array, Communicator, MessageWork, RaggedWork, Work, storage_of
from ..native import NativeCommunicator
from .messages import NetMessages
from .network import Network, Peers
from .waits import Waits

_ALIGNMENT = 64
# Most data that travel with the announcement, for two ranks, and for all ranks together if there are more. They go to
# every rank: with more than two, they cross the network more often than necessary.
_INLINE_BYTES_OF_TWO, _INLINE_BYTES_OF_ALL = 64 << 10, 48 << 10
# The same far from each other, where that is quicker than to wait for one delay more: for each rank, and for all.
_FAR_INLINE_BYTES_OF_EACH, _FAR_INLINE_BYTES_OF_ALL = 64 << 10, 256 << 10


Work.register(_core.NetWork)  # written in C++ for speed
RaggedWork.register(_core.NetRaggedWork)


class NetCommunicator(NativeCommunicator):
    """Collectives over transports of its own.

    All sums run in rank order, whichever hosts the ranks are on; so they do in subgroups of every job.
    """

    core: _core.NetCommunicator
    sends_parts: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True

    def __init__(
        self,
        job: Peers,
        network: Network,
        settings: Settings | None = None,
        *,
        inline_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """Collective.

        Args:
            job: whose ranks it connects.
            network: connects them.
            settings: time-outs (default: those of the environment).
            inline_bytes: size of the data that travel with a rank's announcement of an operation (default: 64 KiB for
                two ranks, else 48 KiB divided by their number; between ranks that are far from each other 256 KiB
                divided by their number, at most 64 KiB).
            chunk_bytes: the largest size of a message; larger data are sent in several (default: the network's).
        """
        rank, size = job.topology.rank, job.topology.world_size
        if inline_bytes is None:
            inline_bytes = _INLINE_BYTES_OF_TWO if size <= 2 else _INLINE_BYTES_OF_ALL // size
            if network.is_far:
                inline_bytes = min(_FAR_INLINE_BYTES_OF_EACH, _FAR_INLINE_BYTES_OF_ALL // size)
        self.topology = job.topology
        self._network = network
        self._waits = Waits(job, network, settings or Settings.from_env())
        transport = network.open()
        self.core = _core.NetCommunicator(
            transport,
            rank,
            self._waits.processes,
            inline_bytes,
            chunk_bytes or network.chunk_bytes,
            network.is_far,
        )
        self.core.waits = self._waits  # type: ignore[attr-defined]  # read by csrc/bind/net.cpp
        self._waits.core = self.core
        self._messages = NetMessages(network.open(), self._waits)
        self._waits.help = self._messages.advance
        close_at_exit(self)

    def progress(self) -> None:
        """Local. Move what can be moved without waiting, messages too."""
        super().progress()
        self._messages.progress()

    def barrier(self) -> None:
        """Collective. Return when every rank has called it and all earlier operations of this rank have finished."""
        super().barrier()
        while (oldest := self.core.oldest) is not None:
            self._waits.wait_for(oldest, None)

    def abort(self, reason: str) -> None:
        """Local, from any thread. End all waits with an error; the communicator is of no use afterwards."""
        self._waits.abort_reason = reason

    def close(self) -> None:
        """Local. Leave; ranks that wait for an operation which this one has not finished get an error. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._waits.close(says=not self._network.has_ended)
        idle = self.core.close()
        self._network.close(self._waits.read_last, idle=idle and not self._messages.under_way)
        self.core.waits = self._waits.release()  # type: ignore[attr-defined]

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        # Aligned to cache lines; networks need no special memory.
        n_bytes = count * storage_of(dtype).itemsize
        try:
            memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            me = self._waits.me.name
            raise WireMemoryError(f"{me}: {count} elements of {dtype} do not fit into memory") from error
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + n_bytes].view(storage_of(dtype))

    def _subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        return self._network.subgroup(ranks, key)

    def _start_message(self, sends: bool, array: Array, dtype: str, peer: int, tag: int) -> MessageWork:
        message = self._messages.make(sends, array, dtype, peer, tag)
        try:
            self.core.assist()  # refuses a communicator that is closed or has failed
            self._messages.start(message)
        except CommunicatorError:  # recorded: the next `done` or `wait` raises it
            if self.closed:
                raise
        return message
