"""Collectives over UCX, for ranks on several hosts that any launcher has started.

UCX is loaded at run time: from the package `libucx-cu12` or `libucx-cu13`, which runs without CUDA, or from the
system, whose library may know InfiniBand.
"""

from __future__ import annotations

import atexit
import ctypes.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from secrets import randbits
from typing import ClassVar

from ... import _core
from ...errors import LaunchError, MissingDependencyError, UsageError, pip_install
from ...launch.addresses import own_addresses, own_interfaces, route_to
from ...launch.job.base import Job
from ...launch.job.hosts import HostsJob
from ...launch.processes import environment
from ...settings import Settings
from ..base import Communicator
from .communicator import NetCommunicator
from .hierarchical import HierarchicalCommunicator
from .network import Peers

_PACKAGES = ("libucx-cu12", "libucx-cu13")
# Read by UCX when it is loaded: it must neither handle signals nor replace functions for memory.
_PROCESS = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_MMAP_HOOK_MODE": "none", "UCX_LOG_LEVEL": "fatal"}
_TRANSPORTS_OF_A_NETWORK = 4  # at most
_NUMBER_BITS, _CANDIDATES = 34, 4
_live: set[int] = set()  # numbers of networks


class UcxNetwork:
    """Connections of UCX between the ranks of a job.

    Args:
        job: the job.
        endpoint: a host that all ranks reach, such as the one where they met; or empty.
    """

    chunk_bytes = 1 << 20
    has_ended = False

    def __init__(self, job: Peers, endpoint: str = "") -> None:
        """Collective.

        Raises:
            LaunchError: a host has no address by which others reach it, or ranks use different versions of UCX.
            MissingDependencyError: there is no UCX.
        """
        self._job = job
        interface = _interface(job, endpoint)
        worker = _worker(os.getpid(), interface)
        candidates = [randbits(_NUMBER_BITS) for _ in range(_CANDIDATES)]
        mine = [worker.version, worker.address.hex(), candidates, sorted(_live)]
        versions, addresses, offers, live = zip(*job.exchange(mine), strict=True)
        if len(set(versions)) > 1:
            raise LaunchError(f"the ranks use different versions of UCX: {', '.join(versions)}; install one")
        taken = set().union(*live)
        self._number = next(number for number in offers[0] if number not in taken)
        _live.add(self._number)
        self._worker, self._addresses = worker, [bytes.fromhex(address) for address in addresses]
        self._n_open = 0

    def open(self) -> _core.Transport:
        """Local here. See `Network.open`."""
        number = self._number * _TRANSPORTS_OF_A_NETWORK + self._n_open
        self._n_open += 1
        return self._worker.open(number, self._job.topology.rank, self._addresses)

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
def _worker(pid: int, interface: str) -> _core.UcxWorker:  # noqa: ARG001
    """UCX in this process. A forked child makes its own."""
    user = os.environ
    options = [("TLS", "tcp,self"), ("NET_DEVICES", interface)]
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
    raise MissingDependencyError(f"there is no UCX; {pip_install('hosts')}, or set DISTOPT_UCX_LIBRARY to libucp.so.0")


def _interface(job: Peers, endpoint: str) -> str:
    """Collective. The name of the network interface by which other hosts reach this one."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        job.exchange("")
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
