"""Collectives over UCX, for ranks on several hosts that any launcher has started.

UCX is loaded at run time: from the package `libucx-cu12` or `libucx-cu13`, which runs without CUDA, or from the
system, whose library may know InfiniBand.
"""

from __future__ import annotations

import atexit
import ctypes.util
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from secrets import randbits
from typing import Any, ClassVar

from ... import _core
from ...errors import DistoptError, LaunchError, MissingDependencyError, TransportError, UsageError, pip_install
from ...launch.addresses import own_addresses, own_interfaces, route_to
from ...launch.job.base import Job
from ...launch.job.hosts import HostsJob
from ...launch.processes import environment
from ...settings import Settings
from ..base import Communicator
from .communicator import NetCommunicator
from .distance import is_far
from .hierarchical import HierarchicalCommunicator
from .network import Peers

_PACKAGES = ("libucx-cu12", "libucx-cu13")
# Read by UCX when it is loaded: it must neither handle signals nor replace functions for memory.
_PROCESS = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_DEBUG_SIGNO": "0",
}
_TRANSPORTS_OF_A_NETWORK = 4  # at most
_NUMBER_BITS, _CANDIDATES = 30, 4
# Larger messages wait until the receiver asks for them, so that they fill no memory of a rank that is late; all others
# stream.
_LONGEST_STREAMED_BYTES = 192 << 10
_NEAR_CHUNK_BYTES, _FAR_CHUNK_BYTES = 1 << 20, 128 << 10
_live: set[int] = set()  # numbers of networks
_users: set[int] = set()  # process ids of this process, and of its parents, that use UCX


class UcxNetwork:
    """Connections of UCX between the ranks of a job.

    Args:
        job: the job.
        endpoint: a host that all ranks reach, such as the one where they met; or empty.
    """

    def __init__(self, job: Peers, endpoint: str = "") -> None:
        """Collective.

        Raises:
            LaunchError: a host has no address by which others reach it, or ranks use different versions of UCX, or
                numbers of streams.
            MissingDependencyError: there is no UCX.
        """
        self._job = job
        candidates = [randbits(_NUMBER_BITS) for _ in range(_CANDIDATES)]
        failure: DistoptError | None = None
        mine: list[Any]
        try:
            self._worker = _worker(os.getpid(), _interface(job, endpoint))
            self._streams = Settings.from_env().streams
            mine = [self._worker.version, self._streams, self._worker.address.hex(), candidates, sorted(_live)]
        except DistoptError as error:
            failure, mine = error, [str(error)]
        notes = job.exchange(mine)  # also of a failure, so that no rank waits
        if failure is not None:
            raise failure
        for rank, note in enumerate(notes):
            if len(note) == 1:
                raise LaunchError(f"rank {job.numbers[rank]} cannot use UCX: {note[0]}")
        versions, streams, addresses, offers, live = zip(*notes, strict=True)
        if len(set(versions)) > 1:
            raise LaunchError(f"the ranks use different versions of UCX: {', '.join(versions)}; install one")
        if len(set(streams)) > 1:
            raise LaunchError(f"DISTOPT_STREAMS differs between the ranks: {', '.join(map(str, streams))}")
        taken = set().union(*live)
        self._number = next(number for number in offers[0] if number not in taken)
        _live.add(self._number)
        self._addresses = [bytes.fromhex(address) for address in addresses]
        self._n_open = 0
        self._pid = os.getpid()
        self.is_far = is_far(job, self.open(), self._worker)
        streams_chunks = self.is_far or self._streams > 1
        self.chunk_bytes = _FAR_CHUNK_BYTES if streams_chunks else _NEAR_CHUNK_BYTES

    @property
    def has_ended(self) -> bool:
        """Local. See `Network.has_ended`: in a forked child."""
        return os.getpid() != self._pid

    def open(self) -> _core.Transport:
        """Local here. See `Network.open`.

        Raises:
            LaunchError: the interface of a rank does not lead to another rank.
        """
        number = self._number * _TRANSPORTS_OF_A_NETWORK + self._n_open
        self._n_open += 1
        try:
            return self._worker.open(number, self._job.topology.rank, self._addresses, self._streams)
        except TransportError as error:
            raise LaunchError(
                f"rank {self._job.topology.rank} does not reach the other ranks ({error}); name a network interface "
                "that does in GLOO_SOCKET_IFNAME"
            ) from error

    def close(self, read_last: Callable[[], object], *, idle: bool) -> None:
        """Local. See `Network.close`."""
        if idle:
            _live.discard(self._number)

    def subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        """Collective among `ranks`. See `Network.subgroup`."""
        if not isinstance(self._job, HostsJob):
            raise UsageError("this communicator serves a process group of PyTorch; call torch.distributed.new_group")
        job = self._job.subgroup(ranks, key)
        return UcxCommunicator(job, UcxNetwork(job))


class UcxCommunicator(NetCommunicator):
    """Collectives over UCX. A thread makes progress where no call does."""

    name: ClassVar[str] = "ucx"

    @classmethod
    def create(cls, job: Job) -> NetCommunicator:
        """Collective. The communicator of `job`; see `communicator_over_ucx`."""
        if not isinstance(job, HostsJob):
            raise UsageError(f"transport {cls.name!r} connects hosts, and cannot serve a {type(job).__name__}")
        return communicator_over_ucx(job, job.endpoint)


def communicator_over_ucx(job: Peers, endpoint: str = "", settings: Settings | None = None) -> NetCommunicator:
    """Collective. The communicator of a job of several hosts, which sums by host where each has as many ranks.

    Args:
        job: the job.
        endpoint: see `UcxNetwork`.
        settings: see `NetCommunicator`.
    """
    sizes = set(map(len, job.ranks_of_hosts))
    kind = HierarchicalCommunicator if len(sizes) == 1 and sizes != {1} else UcxCommunicator
    return kind(job, UcxNetwork(job, endpoint), settings)


@cache
def _worker(pid: int, interface: str) -> _core.UcxWorker:
    """UCX in this process.

    Raises:
        UsageError: a process from which this one was forked uses UCX, whose threads are absent here.
    """
    _users.add(pid)
    if len(_users) > 1:
        raise UsageError(
            "this process was forked from one that uses UCX, and UCX does not work in forked children; start it with "
            "multiprocessing.get_context('spawn'), or choose DISTOPT_TRANSPORT=auto"
        )
    user = os.environ
    options = [("NET_DEVICES", interface)]
    if "UCX_TLS" not in user:  # for TCP: other networks, such as InfiniBand, have their own best way
        options += [("TLS", "tcp,self"), ("RNDV_THRESH", str(_LONGEST_STREAMED_BYTES)), ("RNDV_SCHEME", "am")]
    with environment({name: value for name, value in _PROCESS.items() if name not in user}):
        worker = _core.UcxWorker(library(), [one for one in options if f"UCX_{one[0]}" not in user])
    atexit.register(worker.stop)
    return worker


@cache
def library() -> str:
    """Local. The path of libucp.

    Raises:
        MissingDependencyError: there is none.
    """
    if path := os.environ.get("DISTOPT_UCX_LIBRARY"):
        return path
    for name in _PACKAGES:
        with suppress(PackageNotFoundError, OSError):  # it is not installed, or not whole
            return str(Path(str(distribution(name).locate_file("libucx/lib/libucp.so.0"))).resolve(strict=True))
    if found := ctypes.util.find_library("ucp"):
        return found
    raise MissingDependencyError(
        f"there is no UCX: {pip_install('hosts')}, or set DISTOPT_UCX_LIBRARY to the path of libucp.so.0"
    )


def _interface(job: Peers, endpoint: str) -> str:
    """Collective. The name of the network interface by which other hosts reach this one."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        job.exchange("")
        names = [name for _, name in socket.if_nameindex()]
        if named not in names:
            raise LaunchError(
                f"rank {job.numbers[job.topology.rank]} has no network interface {named!r}, which GLOO_SOCKET_IFNAME "
                f"names; it has {', '.join(names)}"
            )
        return named
    own = own_addresses()
    route = route_to(endpoint) if endpoint else ""
    offers = job.exchange(route or next(iter(own), ""))
    abroad = [offer for rank, offer in enumerate(offers) if rank not in job.local_ranks and offer not in ("", *own)]
    address = route or route_to(abroad[0] if abroad else "") or offers[job.topology.rank]
    for name, known in own_interfaces():
        if known == address:
            return name
    raise LaunchError(
        f"rank {job.topology.rank} has found no address by which other hosts reach it; name a network interface in "
        "GLOO_SOCKET_IFNAME, or make MASTER_ADDR an address that all hosts reach"
    )
