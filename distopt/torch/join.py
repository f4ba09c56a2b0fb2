"""How the ranks of a process group find each other: through PyTorch's store, then on a socket of each host.

Ranks on several hosts are then connected by PyTorch's Gloo.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from secrets import token_bytes
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from ..comm.shm import ShmCommunicator
from ..comm.single import SingleCommunicator
from ..errors import DistoptError, LaunchError, Process
from ..flight.recorder import flight_record
from ..launch.addresses import own_addresses
from ..launch.end_together.siblings import Absence
from ..launch.job.multiprocess import refuse_worker
from ..launch.job.topology import Topology, host_identity, places_of
from ..launch.rendezvous.host_group import HostGroup
from ..settings import Settings
from ..timeline import timeline
from .group.process_group import DistoptProcessGroup
from .hosts.communicator import HostsCommunicator
from .hosts.gloo import Gloo, route_to
from .phases import watch_phases

if TYPE_CHECKING:
    from ..comm.base import Communicator


_known: dict[int, Process] = {}  # the ranks of earlier groups, by number in the job, for messages about absent ranks


def join(options: Any, backend_options: object = None) -> DistoptProcessGroup:  # noqa: ARG001
    """Collective. Make the group of the ranks that `options` describes, as `Backend.register_backend` asks for it.

    Args:
        options: PyTorch's `DistributedBackendOptions`.
        backend_options: the `pg_options` of `init_process_group`; the backend has none.

    Raises:
        DistBackendError: the ranks did not find each other.
    """
    ranks = options.global_ranks_in_group
    if not ranks:  # the default group; ranks of an earlier one may have ended
        _known.clear()
        ranks = range(options.group_size)
    return _make(options.store, options.group_rank, ranks, options.group_id, options.timeout)


def _make(store: dist.Store, rank: int, ranks: Sequence[int], name: str, timeout: timedelta) -> DistoptProcessGroup:
    """Collective. Make the group of `ranks`, given by their numbers in the job; this process is `ranks[rank]`."""
    refuse_worker()
    size = len(ranks)

    def connect(store: dist.Store, name: str) -> tuple[Communicator, list[Process]]:
        return _communicator(store, rank, ranks, timeout.total_seconds(), name)

    def connect_again(name: str) -> Communicator:
        # A clone, since other threads may use the store now, and it serves one at a time.
        return connect(dist.PrefixStore(name, store.clone()), name)[0]

    try:
        communicator, processes = connect(store, name)
    except DistoptError as error:
        raise DistBackendError(f"rank {rank} of {size}: {error}") from error
    who = [process.name for process in processes]
    return DistoptProcessGroup(store, rank, size, name, communicator, connect_again, _make, timeout, who)


def communicator_of_store(store: dist.Store, rank: int, ranks: Sequence[int], seconds: float) -> Communicator:
    """Collective. A communicator of ranks that share a store.

    Args:
        store: of these ranks, used for nothing else.
        rank: of this process among them.
        ranks: their numbers in the job.
        seconds: how long an operation waits for a rank.

    Raises:
        LaunchError: a rank did not come.
    """
    refuse_worker()
    return _communicator(store, rank, ranks, seconds, "codecs")[0]


def _communicator(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, name: str
) -> tuple[Communicator, list[Process]]:
    """Collective. A communicator of `ranks`, and their processes; the flight record calls it `name`.

    When it returns, no rank needs the store any more, so the rank that serves the store may leave.
    """
    size = len(ranks)
    communicator, processes, offers = _connect(store, rank, ranks, timeout)
    communicator.record(name, ranks, ranks[rank], offers)
    try:
        if size > 1:
            store.delete_key(str(rank))  # all have read it, and a later group may use the same store and name
            communicator.barrier()
        if ranks[0] == 0:  # whose clock is the reference
            timeline.open(ranks[rank], communicator.topology.hosts, communicator.all_gather_bytes, watch_phases)
    except BaseException:
        communicator.close()
        raise
    return communicator, processes


def _connect(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout: float
) -> tuple[Communicator, list[Process], list[Any]]:
    size, host, pid = len(ranks), socket.gethostname(), os.getpid()
    if size == 1:
        return SingleCommunicator(Topology.of_one_host(rank, size, host)), [Process(ranks[0], host, pid)], []
    master = _host_of(store)
    address = route_to(master)
    offered = address or next(iter(own_addresses()), "")
    note = [host_identity(), host, pid, token_bytes(16).hex(), offered, flight_record.offer()]
    store.set(str(rank), json.dumps(note))
    await_all(store, rank, ranks, timeout)
    notes = [json.loads(each) for each in store.multi_get([str(q) for q in range(size)])]
    processes = [Process(q, name, pid) for q, (_, name, pid, *_) in zip(ranks, notes, strict=True)]
    offers = [offer for *_, offer in notes]
    _known.update((process.rank, process) for process in processes)
    identities, names = ([note[part] for note in notes] for part in (0, 1))
    topology, hosts, mine = places_of(rank, identities, names)
    local = _of_host(mine, rank, processes, bytes.fromhex(notes[mine[0]][3]), timeout)
    if len(hosts) == 1:
        return local, processes, offers
    try:
        abroad = [theirs for q, (*_, theirs, _) in enumerate(notes) if q not in mine and theirs]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        address = address or route_to(abroad[0] if abroad else "") or offered
        if not (address or interface):
            raise LaunchError(
                f"{processes[rank].name} has found no address by which other hosts reach it; name a network interface "
                "in GLOO_SOCKET_IFNAME, or make MASTER_ADDR an address that all hosts reach"
            )
        gloo = Gloo(dist.PrefixStore("gloo", store), rank, processes, address, interface, timeout)
        return HostsCommunicator(topology, hosts, local, gloo, timeout), processes, offers
    except BaseException:
        local.close()
        raise


def await_all(store: dist.Store, rank: int, ranks: Sequence[int], timeout: float) -> None:
    """Collective. Wait until the notes of all ranks are in the store."""
    try:
        store.wait([str(q) for q in range(len(ranks))], timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [rank for q, rank in enumerate(ranks) if not store.check([str(q)])]
        if absent:
            store.delete_key(str(rank))  # a later group may use the same store and name
            names = ", ".join(_known[rank].name if rank in _known else f"rank {rank}" for rank in absent)
            raise LaunchError(
                f"{names} did not join the group of ranks {list(ranks)} within {timeout:g} s; every rank must make the "
                "same groups in the same order"
            ) from error


def _of_host(
    mine: Sequence[int], rank: int, processes: Sequence[Process], secret: bytes, timeout: float
) -> Communicator:
    """Collective among the ranks of this host. Make their communicator."""
    place, size, host = mine.index(rank), len(mine), processes[rank].host
    topology = Topology.of_one_host(place, size, host)
    if size == 1:
        return SingleCommunicator(topology)
    stall_warning = Settings.from_env().stall_warning
    group = HostGroup(secret, place, size, timeout, Absence(stall_warning))
    try:
        limits = Settings(timeout=timeout, stall_warning=stall_warning)
        return ShmCommunicator(group, topology, limits, ranks=[processes[q].rank for q in mine])
    finally:
        group.close()


def _host_of(store: dist.Store) -> str:
    """The name of the host that serves the store; empty for a store in a file or in memory."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else ""
