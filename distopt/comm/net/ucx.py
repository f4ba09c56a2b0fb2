"""Collectives over UCX, for ranks on several hosts that any launcher has started.

UCX is loaded at run time: from the package `libucx-cu12` or `libucx-cu13`, which runs without CUDA, or from the
system, whose library may know InfiniBand.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from secrets import randbits
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ... import _core
from ...errors import DistoptError, LaunchError, MissingDependencyError, TransportError, UsageError, pip_install
from ...launch.addresses import named_interface, own_addresses, own_interfaces, route_to
from ...launch.job.base import Job
from ...launch.job.hosts import HostsJob
from ...launch.processes import environment
from ...launch.sockets import is_free
from ...settings import Settings
from ..base import Communicator
from ..environment import ranks_by_value
from .communicator import NetCommunicator
from .distance import is_far
from .hierarchical import HierarchicalCommunicator
from .network import Peers

_PACKAGES = ("libucx-cu12", "libucx-cu13")
_LIBRARIES = ("libucp", "libuct", "libucs", "libucm")
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
_FOR_TCP = {
    "TLS": "tcp,self",
    "RNDV_THRESH": str(_LONGEST_STREAMED_BYTES),
    "RNDV_SCHEME": "am",
    "TCP_TX_SEG_SIZE": "64kb",
    "TCP_RX_SEG_SIZE": "128kb",
}
_NEAR_CHUNK_BYTES, _FAR_CHUNK_BYTES = 2 << 20, 128 << 10
_live: set[int] = set()  # numbers of networks
_workers: set[_core.UcxWorker] = set()  # to be stopped while Python's threads still run
_users: set[int] = set()  # process ids of this process, and of its parents, that use UCX


class UcxNetwork:
    """Connections of UCX between the ranks of a job.

    Args:
        job: the job.
        endpoint: a host that all ranks reach, such as the one where they met; or empty.
        alone: whether its connections are its own, since those of an earlier network may have been cut.
    """

    def __init__(self, job: Peers, endpoint: str = "", *, alone: bool = False) -> None:
        """Collective.

        Raises:
            LaunchError: a host has no address by which others reach it, or ranks use different versions of UCX, or
                numbers of streams.
            MissingDependencyError: UCX is missing.
        """
        self._job, self._alone = job, alone
        with ExitStack() as stack:
            self._meet(job, endpoint, stack)
            stack.pop_all()

    def _meet(self, job: Peers, endpoint: str, stack: ExitStack) -> None:
        """Collective. Connect with the other ranks; `stack` undoes it, if one of them is lost meanwhile."""
        candidates = [randbits(_NUMBER_BITS) for _ in range(_CANDIDATES)]
        failure: DistoptError | None = None
        mine: list[Any]
        try:
            interface = _interface(job, endpoint)
            self._worker = _new_worker(os.getpid(), interface) if self._alone else _worker(os.getpid(), interface)
            if self._alone:
                stack.callback(self._stop)
            self._streams = Settings.from_env().streams
            mine = [self._worker.version, self._streams, self._worker.address.hex(), candidates, sorted(_live)]
        except DistoptError as error:
            failure, mine = error, [str(error)]
        notes = job.exchange(mine)  # also of a failure, so that no rank waits
        if refused := {rank: note[0] for rank, note in enumerate(notes) if len(note) == 1}:
            by_value = ranks_by_value(refused, job.topology.hosts, job.numbers)
            reasons = "; ".join(f"{ranks}: {reason}" for reason, ranks in by_value.items())
            text = f"UCX cannot connect the hosts: {reasons}"
            if isinstance(job, HostsJob):
                text += "; or start the script with mpiexec, which connects them by MPI"
            _leave_together(job)
            raise (LaunchError if failure is None else type(failure))(text) from failure
        versions, streams, addresses, offers, live = zip(*notes, strict=True)
        for fact, values, cure in (
            ("the ranks use different versions of UCX", versions, f"{pip_install('hosts')} on all hosts"),
            ("DISTOPT_STREAMS differs between the ranks", streams, "give all the same"),
        ):
            if len(set(values)) > 1:
                by_value = ranks_by_value(dict(enumerate(values)), job.topology.hosts, job.numbers)
                found = ", ".join(f"{value} on {ranks}" for value, ranks in by_value.items())
                _leave_together(job)
                raise LaunchError(f"{fact}: {found}; {cure}")
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
        """Local. Whether this is a forked child, which cannot use the network of its parent."""
        return os.getpid() != self._pid

    def open(self) -> _core.Transport:
        """Local here. A new transport between all ranks.

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
        """Local. End the connections if they are this network's alone; others serve further networks."""
        if idle or self._alone:
            _live.discard(self._number)
        if self._alone:
            self._stop()

    def _stop(self) -> None:
        """Local. End the connections, which are this network's alone; idempotent."""
        if self._worker in _workers:
            _workers.remove(self._worker)
            self._worker.stop(cuts=True)  # the rest may run while the GIL is held, and others may be gone

    def subgroup(self, ranks: Sequence[int], key: bytes) -> Communicator:
        """Collective among `ranks`. Their communicator."""
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


def communicator_over_ucx(
    job: Peers, endpoint: str = "", settings: Settings | None = None, *, alone: bool = False
) -> NetCommunicator:
    """Collective. The communicator of a job of several hosts, which sums by host where each has as many ranks.

    Args:
        job: the job.
        endpoint: see `UcxNetwork`.
        settings: see `NetCommunicator`.
        alone: see `UcxNetwork`; its ranks then share no memory.
    """
    if alone:
        with ExitStack() as stack:
            network = UcxNetwork(job, endpoint, alone=True)
            stack.callback(network.close, lambda: None, idle=True)  # if the others are lost meanwhile
            communicator = UcxCommunicator(job, network, settings)
            stack.pop_all()
        return communicator
    sizes = set(map(len, job.ranks_of_hosts))
    kind = HierarchicalCommunicator if len(sizes) == 1 and sizes != {1} else UcxCommunicator
    return kind(job, UcxNetwork(job, endpoint), settings)


def _leave_together(job: Peers) -> None:
    """Collective. The rank that serves the others may end only when all have read why."""
    with suppress(DistoptError, RuntimeError):  # it has ended: all have read it. PyTorch's store raises a RuntimeError
        job.exchange("")


@cache
def _worker(pid: int, interface: str) -> _core.UcxWorker:
    """UCX in this process; see `_new_worker`."""
    return _new_worker(pid, interface)


def _new_worker(pid: int, interface: str) -> _core.UcxWorker:
    """UCX in this process, with connections of its own.

    Raises:
        UsageError: a process from which this one was forked uses UCX, and this one cannot load it a second time.
    """
    _users.add(pid)
    options = {"NET_DEVICES": interface}
    if "UCX_TLS" not in os.environ:  # other networks, such as InfiniBand, have their own best way
        options |= _FOR_TCP
    with environment({name: value for name, value in _PROCESS.items() if name not in os.environ}), ExitStack() as stack:
        path = library()
        if len(_users) > 1:
            path = _copy_of(Path(path), Path(stack.enter_context(TemporaryDirectory(prefix="distopt-ucx-"))))
        worker = _listening(path, options, Settings.from_env().ports)
    if not _workers:
        atexit.register(_stop_all)
    _workers.add(worker)
    return worker


def _stop_all() -> None:
    while _workers:
        _workers.pop().stop()


def _copy_of(path: Path, folder: Path) -> str:
    """Local. A copy of UCX's libraries for a process that was forked from one that uses them; the path of libucp.

    The variables of the libraries speak of threads that are absent here. So this process loads them again, under names
    of equal length that stand also in the files, since the loader knows a library by these.

    Raises:
        UsageError: the files are not there, or other libraries would find the symbols of the first ones.
    """
    files = [path.with_name(f"{name}.so.0") for name in _LIBRARIES]
    if not all(file.exists() for file in files) or hasattr(ctypes.CDLL(None), "ucp_worker_create"):
        raise UsageError(
            "this process was forked from one that uses UCX, which it cannot load a second time; start it with "
            "multiprocessing.get_context('spawn')"
        )
    mark = f".{len(_users) % 16:x}o."
    for file in files:
        content = file.read_bytes()
        for name in _LIBRARIES:
            content = content.replace(f"{name}.so.0\0".encode(), f"{name}{mark}0\0".encode())
        (folder / file.name.replace(".so.", mark)).write_bytes(content)
    return str(folder / f"{_LIBRARIES[0]}{mark}0")


def _listening(path: str, options: Mapping[str, str], ports: range | None) -> _core.UcxWorker:
    """UCX, at one of the ports.

    UCX gets one port at a time: in a range whose ports are all taken, it looks for a free one without end.
    """
    user = os.environ
    given = [(name, value) for name, value in options.items() if f"UCX_{name}" not in user]
    if ports is None or "UCX_TCP_PORT_RANGE" in user:
        return _core.UcxWorker(path, given)
    first = os.getpid() % len(ports)  # ranks of a host begin at different ones
    for port in filter(is_free, (*ports[first:], *ports[:first])):
        try:
            return _core.UcxWorker(path, [*given, ("TCP_PORT_RANGE", f"{port}-{port}")])
        except TransportError:  # noqa: PERF203
            if is_free(port):  # that is not the reason
                raise
    raise LaunchError(f"all ports of DISTOPT_PORTS={ports[0]}-{ports[-1]} are taken; free one, or give a wider range")


@cache
def library() -> str:
    """Local. The path of libucp.

    Raises:
        MissingDependencyError: there is none.
    """
    if path := Settings.from_env().ucx_library:
        return path
    for line in Path("/proc/self/maps").read_text().splitlines():
        # Such as MPICH's, if the script has imported mpi4py.MPI: a second one would find symbols of the first.
        if (path := line.partition("/")[2]).rpartition("/")[2].startswith("libucp.so."):
            return f"/{path}"
    for name in _PACKAGES:
        with suppress(PackageNotFoundError, OSError):  # it is not installed, or not whole
            return str(Path(str(distribution(name).locate_file("libucx/lib/libucp.so.0"))).resolve(strict=True))
    if found := ctypes.util.find_library("ucp"):
        return found
    raise MissingDependencyError(
        f"there is no UCX: {pip_install('hosts')}, or set DISTOPT_UCX_LIBRARY to the path of its libucp.so.0"
    )


def _interface(job: Peers, endpoint: str) -> str:
    """Collective. The name of the network interface by which other hosts reach this one."""
    own = own_addresses()
    route = route_to(endpoint) if endpoint else ""
    offers = job.exchange([route] if route else own)
    if named := named_interface():
        names = [name for _, name in socket.if_nameindex()]
        if named not in names:
            raise LaunchError(
                f"there is no network interface {named!r}, which GLOO_SOCKET_IFNAME names; there are {', '.join(names)}"
            )
        return named
    if not any(offers):  # containers of one machine that share its network, which has nothing but the loopback
        return "lo"
    # Hosts may have equal addresses, such as those of bridges for containers, by which they do not reach each other.
    abroad = [each for rank, offer in enumerate(offers) if rank not in job.local_ranks for each in offer]
    routes = (route_to(each) for each in abroad if each not in own)
    address = route or next(filter(None, routes), "") or next(iter(own), "")
    for name, known in own_interfaces():
        if known == address:
            return name
    raise LaunchError(
        "there is no address by which other hosts reach this one; name a network interface in GLOO_SOCKET_IFNAME, or "
        "make MASTER_ADDR an address that all hosts reach"
    )
