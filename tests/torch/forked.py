"""Ranks that are forked from this process, which has imported PyTorch: on this host, or on two that are emulated.

Their number is written as "3", or "2+1" for two ranks on one host and one on another.
"""

import ctypes
import itertools
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.networks.emulation import LINK, Host, TwoHosts, two_hosts

CONTEXT = multiprocessing.get_context("fork")
_PORT = 29_500
_PR_SET_PDEATHSIG, _CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 1, 0x2_0000, 0x0400_0000, 0x4000_0000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x4_0000, 2


def counts_of(text: str) -> list[int]:
    """Ranks on each host."""
    return [int(word) for word in text.split("+")]


class Place:
    """Where ranks run and meet.

    Attributes:
        counts: ranks on each host.
        net: the emulated hosts; None: all run on this one.
        size: number of ranks.
    """

    _number = itertools.count()

    def __init__(self, counts: list[int], net: TwoHosts | None, prefix: str) -> None:
        """`prefix`: of the files of stores."""
        self.counts, self.net = counts, net
        self.size = sum(counts)
        self._hosts = [host for host, count in zip(net.hosts, counts, strict=True) for _ in range(count)] if net else []
        self._prefix = prefix
        self._processes: list[BaseProcess] = []

    def method(self) -> str:
        """Where ranks can meet, as `init_process_group` takes it; another one each time."""
        number = next(self._number)
        return f"tcp://{self.net.hosts[0].address}:{_PORT + number}" if self.net else f"file://{self._prefix}{number}"

    def start(self, main: Callable[..., None], *args: object) -> list[BaseProcess]:
        """Start `main(rank, *args)` on every rank."""
        ranks = [CONTEXT.Process(target=self._run, args=(self.host_of(q), main, q, *args)) for q in range(self.size)]
        for process in ranks:
            process.start()
        self._processes += ranks
        return ranks

    def end(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """End what has not ended by a signal."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signum)
        for process in self._processes:
            process.join()

    def keep_store(self, method: str) -> None:
        """Serve a TCP store in a process that outlives ranks, as torchrun's agent does; for `join`."""
        if self.net:
            ready = CONTEXT.Event()
            self._processes.append(CONTEXT.Process(target=_serve, args=(self.net.hosts[0], method, ready), daemon=True))
            self._processes[-1].start()
            assert ready.wait(200), "no store"

    def host_of(self, rank: int) -> Host | None:
        return self._hosts[rank] if self._hosts else None

    def host_name(self, rank: int) -> str:
        return self._hosts[rank].name if self._hosts else socket.gethostname()

    def peers_of(self, rank: int) -> list[int]:
        """The ranks of other hosts."""
        return [q for q in range(self.size) if self.host_of(q) is not self.host_of(rank)]

    @staticmethod
    def _run(host: Host | None, main: Callable[..., None], rank: int, *args: object) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a test ends the parent alone where it hangs
        torch.set_num_threads(1)
        if host:
            enter(host)
        main(rank, *args)


def _serve(host: Host, method: str, ready: Event) -> None:
    enter(host)
    address, port = _address(method)
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    ready.set()
    signal.pause()
    del store


@contextmanager
def place_of(text: str) -> Iterator[Place]:
    """The place of as many ranks as `text` says; the hosts are removed at the end."""
    hosts = two_hosts(f"-torch{text.replace('+', '')}") if "+" in text else nullcontext()
    with TemporaryDirectory() as folder, hosts as net:
        place = Place(counts_of(text), net, f"{folder}/")
        try:
            yield place
        finally:
            place.end()


def in_group(text: str, body: Callable[[], Any], backend: str = "distopt") -> list[Any]:
    """What `body` returns on each rank of a default group; or the error's trace."""
    with place_of(text) as place:
        answers = CONTEXT.Queue()
        ranks = place.start(_answer, place.size, place.method(), backend, body, answers)
        found = dict(answers.get(timeout=500) for _ in ranks)
        for process in ranks:
            process.join(60)
    return [found[rank] for rank in range(place.size)]


def _answer(rank: int, size: int, method: str, backend: str, body: Callable[[], Any], answers: Any) -> None:
    try:
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
        answers.put((rank, body()))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc()))


def join(rank: int, size: int, method: str, seconds: float, generation: str = "") -> None:
    """Collective. Make the default group with a store that `keep_store` serves; a later one has another generation."""
    if method.startswith("file"):
        store: dist.Store = dist.FileStore(method.removeprefix("file://") + generation, size)
    else:
        store = dist.PrefixStore(f"generation{generation}", dist.TCPStore(*_address(method), is_master=False))
    dist.init_process_group("distopt", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def _address(method: str) -> tuple[str, int]:
    address, _, port = method.removeprefix("tcp://").rpartition(":")
    return address, int(port)


def on_emulated_host() -> bool:
    """Local. Whether this process has entered one."""
    return LINK in {name for _, name in socket.if_nameindex()}


# The end of one of Gloo's groups waits, holding Python's lock, for its threads, which may wait for that lock.
_KEPT: list[dist.ProcessGroup] = []


def group_with_gloo(ranks: Iterable[int], backend: str = "gloo") -> dist.ProcessGroup:
    """Collective. A group of Gloo's, which does not find the interface between emulated hosts by itself."""
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": LINK} if on_emulated_host() else {}):
        _KEPT.append(dist.new_group(list(ranks), backend=backend))
    return _KEPT[-1]


def enter(host: Host) -> None:
    """Move this process to an emulated host. Its threads stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host.namespace).open() as namespace:
        if libc.unshare(_CLONE_NEWUTS) or libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
    # UCX looks for network interfaces in /sys.
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.umount2(b"/sys", _MNT_DETACH)
        or libc.mount(host.name.encode(), b"/sys", b"sysfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), f"cannot mount the /sys of {host.namespace}")
    socket.sethostname(host.name)
