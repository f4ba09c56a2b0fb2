"""Ranks as processes of this host, for tests."""

import inspect
import logging
import multiprocessing
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distopt.comm.base import Communicator
from distopt.comm.net.mpi import MpiCommunicator
from distopt.comm.net.ucx import communicator_over_ucx, library
from distopt.comm.shm import ShmCommunicator
from distopt.errors import CommunicatorError, MissingDependencyError
from distopt.launch.end_together.lifeline import reach
from distopt.launch.gate import FOR_KEYS
from distopt.launch.job.base import Job
from distopt.launch.job.hosts import HostsJob
from distopt.launch.job.mpi import MpiJob
from distopt.launch.job.offer import Offer, start
from distopt.launch.job.topology import Topology
from distopt.launch.rendezvous.host_group import HostGroup
from distopt.launch.rendezvous.key_value import RemoteClient
from distopt.settings import Settings
from tests.processes import LIMIT_SECONDS

# A clean server that has imported everything heavy forks the ranks: as fast as fork, without pytest's threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["numpy", "distopt.comm.shm", "tests.conformance.checks"])


class LocalJob(Job):
    """A job on this host, from a ticket."""

    def __init__(self, ticket: bytes, rank: int, world_size: int) -> None:
        self.topology = Topology.of_one_host(rank, world_size, socket.gethostname())
        self._group = HostGroup(ticket, rank, world_size, PATIENT.timeout)

    def _make_host_group(self) -> HostGroup:
        raise AssertionError


@contextmanager
def forked() -> Iterator[bool]:
    """Run the block in a forked child, too, which ends with it, and must not raise. Gives whether this is the child."""
    child = os.fork()
    if child:
        yield False
        assert os.waitpid(child, 0)[1] == 0
        return
    code = 1
    try:
        yield True
        code = 0
    finally:
        os._exit(code)


class SmallChunkCommunicator(ShmCommunicator):
    """Takes arrays of moderate size through many chunks."""

    @classmethod
    def create(cls, job: Job) -> "SmallChunkCommunicator":
        return cls(job.host_group(), job.topology, chunk_bytes=8192)


class SmallPartsCommunicator(MpiCommunicator):
    """The same over MPI."""

    @classmethod
    def create(cls, job: Job) -> "SmallPartsCommunicator":
        return cls(job, inline_bytes=64, chunk_bytes=512)


def blocks() -> MpiJob:
    """A job of mpiexec whose ranks believe to be on several hosts: two neighbours on each."""
    from mpi4py import MPI

    return MpiJob(host=f"host{MPI.COMM_WORLD.rank // 2}")


def round_robin() -> MpiJob:
    """The same with neighbours on different hosts."""
    from mpi4py import MPI

    return MpiJob(host=f"host{MPI.COMM_WORLD.rank % 2}")


def join_gloo(job: Job, backend: str = "gloo") -> None:
    """Make the ranks a process group of PyTorch's."""
    import torch.distributed as dist

    rank, size = job.topology.rank, job.topology.world_size
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = int(job.all_gather(str(served.port if served else 0).encode())[0])
    store = served or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


class OverGloo:
    """The ranks of one of PyTorch's Gloo groups, as `distopt.torch.hook` and its like communicate."""

    @classmethod
    def create(cls, job: Job) -> Communicator:
        from distopt.torch.training.communicator import communicator_of

        join_gloo(job)
        return communicator_of()


class OverGlooOfHosts(OverGloo):
    """The same for ranks of one host that believe to be on several: two neighbours on each."""

    @classmethod
    def create(cls, job: Job) -> Communicator:
        from distopt.torch import store_job

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        host = f"host{job.topology.rank // 2}"
        store_job.host_identity = lambda: host
        store_job.socket = SimpleNamespace(gethostname=lambda: host)
        return super().create(job)


class HostsOfOneMachine(HostsJob):
    """The ranks of `job` believe to be on several hosts, with as many neighbours on each."""

    def __init__(self, job: Job, per_host: int) -> None:
        self._settings = Settings.from_env()
        rank, size, seconds = job.topology.rank, job.topology.world_size, self._settings.timeout
        offer = Offer.of(job.all_gather(start(size, seconds, end_together=False)[1] if rank == 0 else b"")[0])
        link = reach(offer.addresses, offer.key, FOR_KEYS, rank, size, seconds, "rank 0")
        self._client = RemoteClient(link, rank, range(size), seconds, "the server of rank 0")
        self._introduce(rank, f"host{rank // per_host}", f"host{rank // per_host}")


def has_ucx() -> bool:
    """Whether the tests find UCX."""
    try:
        return bool(library())
    except MissingDependencyError:
        return False


needs_ucx = pytest.mark.skipif(not has_ucx(), reason="UCX is absent: pip install libucx-cu12")


class OverUcx:
    """UCX between ranks of one machine that take themselves for hosts of their own."""

    per_host = 1

    @classmethod
    def create(cls, job: Job) -> Communicator:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return communicator_over_ucx(HostsOfOneMachine(job, cls.per_host))


class OverUcxByHost(OverUcx):
    """The same with two neighbours on each host."""

    per_host = 2


@dataclass
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: str | None = None  # class name of the exception
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # of a CommunicatorError
    trace: str = ""
    pid: int = 0
    exit_code: int | None = None


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any) -> list[Outcome]:
    """Call `body(job, *args)` in `world_size` processes; what each returned or raised, in rank order.

    `body` must be importable by name. A rank that ends without an answer has an exit code and nothing else.
    """
    ticket = secrets.token_bytes(16)
    processes, ends = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main, args=((body, args), ticket, rank, world_size, sender), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        ends.append(receiver)
    deadline = time.monotonic() + LIMIT_SECONDS
    outcomes = []
    try:
        for process, end in zip(processes, ends, strict=True):
            outcome = Outcome(pid=process.pid or 0)
            try:
                if not end.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(
                        f"rank {len(outcomes)} (pid {process.pid}) gave no answer in {LIMIT_SECONDS:.0f} s"
                    )
                outcome = end.recv()
            except EOFError:
                pass
            process.join(max(0.1, deadline - time.monotonic()))
            outcome.exit_code = process.exitcode
            outcomes.append(outcome)
    finally:
        for process, end in zip(processes, ends, strict=True):
            process.kill()
            process.join()
            end.close()
    return outcomes


def run_ranks_ok(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As `run_ranks`, for ranks that must all succeed: what they returned."""
    return values_of(run_ranks(body, world_size, *args))


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """What ranks that must all have succeeded returned."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def assert_passed(outcomes: list[Outcome], check: str) -> None:
    """By all ranks that have run `tests.conformance.run.run_checks`."""
    for rank, report in enumerate(values_of(outcomes)):
        trace = report.get(check, "not reached: an earlier check failed")
        assert trace is None, f"rank {rank}:\n{trace}"


def with_ranks(
    world_size: int, connect: Callable[..., Any] | None = None, *, lost: Container[int] = ()
) -> Callable[..., Callable[..., None]]:
    """Make a test of what so many ranks do, all of which must succeed but for those that are to be lost.

    Of its parameters, `job` is the rank's job, `rank` its number, and `comm` what `connect` makes of the job.
    """

    def as_test(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            outcomes = run_ranks(_call, world_size, body, connect, given)
            values_of([outcome for rank, outcome in enumerate(outcomes) if rank not in lost])

        parameters = inspect.signature(body).parameters
        others = [parameters[name] for name in parameters if name not in ("job", "rank", "comm")]
        vars(test).update(body=body, __signature__=inspect.Signature(others))
        body.__qualname__ = f"{body.__name__}.body"  # by which it is found in the other processes
        return test

    return as_test


def _call(job: Job, body: Callable[..., None], connect: Callable[..., Any] | None, given: dict[str, Any]) -> None:
    offered = {"job": job, "rank": job.topology.rank, "comm": connect and connect(job)}
    body(**given, **{name: offered[name] for name in inspect.signature(body).parameters if name in offered})


def _rank_main(
    call: tuple[Callable[..., Any], tuple[Any, ...]], ticket: bytes, rank: int, world_size: int, sender: Connection
) -> None:
    body, args = call
    outcome = Outcome(pid=os.getpid())
    try:
        job = LocalJob(ticket, rank, world_size)
        try:
            outcome.value = body(job, *args)
        finally:
            job.close()
    except BaseException as error:
        outcome.error, outcome.text, outcome.trace = type(error).__name__, str(error), traceback.format_exc()
        if isinstance(error, CommunicatorError):
            outcome.fields = vars(error)
    sender.send(outcome)
    sender.close()


PATIENT = Settings(timeout=120.0, stall_warning=60.0)  # nothing lasts so long on a busy machine
HASTY = Settings(timeout=3.0, stall_warning=1.0)


def connect(job: LocalJob, settings: Settings = PATIENT) -> ShmCommunicator:
    return ShmCommunicator(job.host_group(), job.topology, settings)


def disagree(job: LocalJob, connect: Callable[..., Communicator], which: str) -> None:
    """The last rank calls something else over what `connect` makes."""
    comm = connect(job)
    odd = job.topology.rank == job.topology.world_size - 1
    comm.barrier()
    small, large = comm.xp.zeros(10), comm.xp.zeros(50_000)
    calls: dict[str, Callable[[], Any]] = {
        "operation": lambda: comm.broadcast(small) if odd else comm.all_reduce(large, label="bucket 3"),
        "count": lambda: comm.all_reduce(small if odd else large),
        "empty": lambda: comm.all_reduce(small[:0] if odd else large),
        "dtype": lambda: comm.all_reduce(small.astype(np.float32) if odd else small),
        "reduction": lambda: comm.all_reduce(small, "max" if odd else "sum"),
        "label": lambda: comm.all_reduce(large, label="bucket 4" if odd else "bucket 3"),
        "look": lambda: comm.all_reduce(small, find_nonfinite=odd),
        "root": lambda: comm.broadcast(small, root=int(odd)),
        "wire memory": lambda: comm.empty(10 + job.topology.rank, "int64"),  # raises by itself
    }
    calls[which]().wait(100.0)


def log_of_distopt() -> list[str]:
    """The lines of its log from now on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distopt").addHandler(handler)
    return records


def signalled(signum: int, wait: Callable[[], object]) -> None:
    """Wait, while a signal comes; on a busy machine it may come before the wait, but not before this call."""
    threading.Timer(0.5, os.kill, (os.getpid(), signum)).start()
    wait()
