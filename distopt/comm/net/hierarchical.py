"""Collectives over several hosts with several ranks each: shared memory inside a host, a network between hosts.

An all_reduce above `by_host_above_bytes` runs in three stages: every rank reduces its slice over the ranks of its host,
then over the ranks that carry the same slice on the other hosts, then the slices are gathered inside the host. So the
network carries the bytes that one rank per host would send, divided among the host's ranks. All else runs
as in `NetCommunicator`: it is rare in training, or small.

The sum of such an array runs host by host, in the order of their first ranks, inside a host in rank order: equal bits
on all ranks and on every run, but not always the bits of the flat communicators. 16-bit floats are accumulated in
float32 and rounded once per host and once more at the end; their mean is divided in both places, in float32, so that no
sum of a host overflows. Means of other types are divided once, at the end.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import UsageError
from ...launch.job.base import Job
from ...launch.job.topology import Topology
from ...settings import Settings
from ..base import Array
from ..shm import ShmCommunicator
from .communicator import NetCommunicator
from .mpi import MpiNetwork, job_of_mpi
from .network import Network, Peers


class HierarchicalCommunicator(NetCommunicator):
    """Collectives over hosts with equal numbers of ranks, however the ranks are dealt out to them.

    Progress happens in `done`, `wait` and `progress` only. Other numbers raise a UsageError.
    """

    name: ClassVar[str] = "hierarchical"

    @classmethod
    def create(cls, job: Job) -> HierarchicalCommunicator:
        """Collective. Build the communicator of `job`, which must be one of MPI; for others, see `comm.net.ucx`."""
        of_mpi = job_of_mpi(job, cls.name)
        return cls(of_mpi, MpiNetwork(of_mpi))

    def __init__(self, job: Peers, network: Network, settings: Settings | None = None) -> None:
        """Collective. The arguments are those of `NetCommunicator`."""
        hosts = job.ranks_of_hosts
        if len(set(map(len, hosts))) > 1:
            counts = ", ".join(f"{len(ranks)} on {job.topology.hosts[ranks[0]]}" for ranks in hosts)
            raise UsageError(f"transport hierarchical needs as many ranks on every host, not {counts}; choose mpi")
        super().__init__(job, network, settings)
        group, local = job.host_group(), job.topology
        names = Topology.of_one_host(local.local_rank, local.local_size, local.host)
        numbers = [job.numbers[rank] for rank in job.local_ranks]
        self._scatter = ShmCommunicator(group, names, settings, ranks=numbers)
        self._collect = ShmCommunicator(group, names, settings, ranks=numbers, wire_of=self._scatter)
        if Settings.from_env().sum_order == "rank":
            return
        self.by_host_above_bytes = self.core.inline_bytes
        self.reduces_in_place = True
        place = local.local_rank
        self.core.use_hierarchy(
            local=place,
            between=[ranks[place] for ranks in hosts],
            host=hosts.index(job.local_ranks),
            scatter=self._scatter.core,
            collect=self._collect.core,
        )

    def _empty(self, count: int, dtype: str, xp: Any) -> Array:
        # It waits without calling the network, so no operation may be under way that needs this rank.
        self.barrier()
        return self._scatter.empty(count, dtype)

    def close(self) -> None:
        """Local. Leave; ranks that wait for an operation which this one has not finished get an error. Idempotent."""
        super().close()
        self._collect.close()
        self._scatter.close()
