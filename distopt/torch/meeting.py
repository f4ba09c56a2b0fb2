"""The ranks of a process group meet: through the store that PyTorch has given them, then on a socket of their host."""

from __future__ import annotations

import json
import os
import socket
from secrets import token_bytes
from typing import TYPE_CHECKING, Any

from torch.distributed import DistBackendError

from ..comm.shm import ShmCommunicator
from ..comm.single import SingleCommunicator
from ..errors import DistoptError
from ..launch.join.rendezvous import HostGroup
from ..launch.topology import Topology, host_identity
from ..launch.watch.siblings import Absence
from ..settings import Settings
from .process_group import DistoptProcessGroup

if TYPE_CHECKING:
    from ..comm.base import Communicator

__all__ = ["meet"]


def meet(options: Any, backend_options: object = None) -> DistoptProcessGroup:  # noqa: ARG001
    """Collective. Make the group of the ranks that `options` describes; what `Backend.register_backend` wants.

    Args:
        options: PyTorch's `DistributedBackendOptions`.
        backend_options: the `pg_options` of `init_process_group`; the backend has none.

    Raises:
        DistBackendError: the ranks are on several hosts, or did not find each other.
    """
    rank, size = options.group_rank, options.group_size
    settings = Settings.from_env()
    timeout = options.timeout.total_seconds()
    try:
        communicator, who = _communicator(options, rank, size, timeout, settings)
    except DistoptError as error:
        raise DistBackendError(f"rank {rank} of {size}: {error}") from error
    return DistoptProcessGroup(options.store, rank, size, communicator, options.timeout, who)


def _communicator(
    options: Any, rank: int, size: int, timeout: float, settings: Settings
) -> tuple[Communicator, list[str]]:
    """The communicator, and what messages call the ranks."""
    host = socket.gethostname()
    if size == 1:
        return SingleCommunicator(Topology.of_one_host(rank, size, host)), [host]
    store = options.store
    secret = token_bytes(16) if rank == 0 else b""
    store.set(str(rank), json.dumps([host_identity(), host, os.getpid(), secret.hex()]))
    notes = [json.loads(note) for note in store.multi_get([str(q) for q in range(size)])]
    for q, (identity, name, pid, _) in enumerate(notes):
        if identity != notes[0][0]:
            raise DistBackendError(
                f"rank {q} (host {name}, pid {pid}) shares no memory with rank 0 (host {notes[0][1]}, pid "
                f"{notes[0][2]}): the backend distopt serves the ranks of one host, in the same container; start all "
                "there, or use gloo for this group"
            )
    group = HostGroup(bytes.fromhex(notes[0][3]), rank, size, timeout, Absence(settings.stall_warning))
    try:
        store.delete_key(str(rank))  # all have read it; a later group may use the same store and name
        topology = Topology.of_one_host(rank, size, host)
        ranks = options.global_ranks_in_group or range(size)
        limits = Settings(timeout=timeout, stall_warning=settings.stall_warning)
        who = [f"rank {q} (host {name}, pid {pid})" for q, (_, name, pid, _) in zip(ranks, notes, strict=True)]
        return ShmCommunicator(group, topology, limits, ranks=ranks), who
    finally:
        group.close()
