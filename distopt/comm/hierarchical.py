"""Collectives over several hosts with several ranks each: shared memory inside a host, MPI between hosts.

An all_reduce of more than 32 KiB runs in three stages: every rank reduces its slice over the ranks of its host, then
over the ranks that carry the same slice on the other hosts, then the slices are gathered inside the host. So what
crosses the network is what one rank per host would send, and all ranks of a host send it together. Everything else is
what `MpiCommunicator` does: it is rare in training, or small.

The sum of such an array runs host by host, in the order of their first ranks, inside a host in rank order: equal bits
on all ranks and on every run, but not always the bits of the flat communicators. 16-bit floats are accumulated in
float32 and rounded once per host and once more at the end; their mean is divided in both places, in float32, so that no
sum of a host overflows. Means of other types are divided once, at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UsageError
from ..launch.topology import Topology
from .base import Works
from .mpi.communicator import MpiCommunicator
from .mpi.steps import LocalRequest, MpiGroup
from .shm import ShmCommunicator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..launch.mpi import MpiJob
    from .base import Array, ReduceOp, Work

__all__ = ["HierarchicalCommunicator"]

# Below, the three stages cost more time than the bytes that they save.
_FLAT_BYTES = 32 << 10
# Larger arrays go in parts of this size, so that one is on the network while another is in shared memory.
_PART_BYTES = 8 << 20


class HierarchicalCommunicator(MpiCommunicator):
    """Collectives over hosts with equal numbers of ranks, however the ranks are dealt out to them.

    Progress happens in `done`, `wait` and `progress` only.
    """

    name: ClassVar[str] = "hierarchical"

    def __init__(self, job: MpiJob) -> None:
        """Collective.

        Raises:
            UsageError: the hosts have different numbers of ranks.
        """
        local = job.topology
        group = job.host_group()
        ranks = [int(rank) for rank in group.all_gather(b"%d" % local.rank)]
        firsts = [int(first) for first in job.all_gather(b"%d" % ranks[0])]  # the first rank of everyone's host
        hosts = sorted(set(firsts))
        if len({firsts.count(host) for host in hosts}) > 1:
            counts = ", ".join(f"{firsts.count(first)} on {local.hosts[first]}" for first in hosts)
            raise UsageError(
                f"the hierarchical communicator needs as many ranks on every host, not {counts}; choose mpi"
            )
        super().__init__(job)
        # One for each stage, since of two operations in different stages either may come first.
        names = Topology.of_one_host(local.local_rank, local.local_size, local.host)
        self._scatter = ShmCommunicator(group, names, ranks=ranks)
        self._collect = ShmCommunicator(group, names, ranks=ranks, wire_of=self._scatter)
        host = hosts.index(ranks[0])
        self._between = MpiGroup(host, len(hosts), *(job.comm.Split(local.local_rank, host) for _ in range(2)))

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        # It waits without calling MPI, so no operation may be under way that needs this rank.
        self.barrier()
        return self._scatter.empty(count, dtype)

    def close(self) -> None:
        """Local. Leave; ranks that wait for an operation which this one has not finished get an error. Idempotent."""
        if self._queue.close():
            self._everyone.free()
            self._between.free()
        self._collect.close()
        self._scatter.close()

    def _all_reduce(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Work:
        if array.nbytes <= _FLAT_BYTES:
            return super()._all_reduce(array, dtype, op, label)
        flat, n = array.reshape(-1), self.topology.local_size
        even = flat.size // n * n
        step = _PART_BYTES // array.itemsize // n * n
        works: list[Work] = []
        for start in range(0, even, step):
            part = flat[start : min(start + step, even)]
            stages = self._stages(part, dtype, op, label)
            works.append(self._queue.begin("all_reduce", [part], stages, dtype, label, count=part.size, op=op))
        if even < flat.size:
            works.append(super()._all_reduce(flat[even:], dtype, op, label))
        return Works(works)

    def _stages(self, array: Array, dtype: str, op: ReduceOp, label: str) -> Iterator[Any]:
        share = array.size // self.topology.local_size
        start = self.topology.local_rank * share
        mine = array[start : start + share]
        divisor = self.topology.world_size if op == "mean" and dtype in ("float32", "float64") else 1
        stage_op: ReduceOp = "sum" if divisor != 1 else op
        yield LocalRequest(self._scatter.reduce_scatter(array, mine, stage_op, wire=dtype, label=label))
        yield from self._reduce_in_slices(self._between, mine, dtype, stage_op, divisor)
        yield LocalRequest(self._collect.all_gather(mine, array, wire=dtype, label=label))
