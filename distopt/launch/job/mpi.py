"""Jobs started by mpiexec. The only module that imports mpi4py, besides `distopt.comm.mpi.communicator`.

If a single rank exits early, MPI_Finalize, and with it the whole job, waits forever. Therefore, in jobs of more than
one rank:

- an uncaught exception prints its traceback and calls MPI_Abort(1) (for an error of distopt, with its exit code; for
  Ctrl-C, with 130);
- `sys.exit(n)` with n != 0 calls MPI_Abort(n) when the interpreter ends, unless the job was closed before. MPICH's
  mpiexec ends with 9 instead of n where it had to kill another rank.
- `os._exit(0)` and C's `exit(0)` say so, and end this process with code 1: MPICH's mpiexec would kill the other ranks
  and end with 0. After the job was closed, `os._exit(0)` calls MPI_Finalize first.

This applies from MPI_Init on, which `launch.main` calls before the script's function, and `launch.join` at the latest.
MPI may not notice a process that exits before that. Ranks of the same host usually notice it; others end after
`DISTOPT_TIMEOUT`. From `MpiJob` on, ranks watch each other: `distopt.launch.watch`.

A forked child does not act for its rank, however it ends. In a script that imports mpi4py.MPI before distopt, mpi4py
itself calls MPI_Finalize at the end of every forked child, which breaks the job: end such children by `os._exit`.

Hazard: the value of an uncaught `raise SystemExit(n)` cannot be observed in Python. A rank that exits this way outside
`launch.main` closes its communicators; peers that wait for it raise, and the job ends with their exit code. Use
`sys.exit(n)` instead. A script that catches its own `sys.exit` and continues should close the job at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from copy import copy
from types import ModuleType
from typing import Any

from ... import _core
from ...errors import LaunchError, MissingDependencyError, pip_install
from ...settings import Settings
from ..end_together.exit_guard import finalize_at_exit, guard
from ..end_together.siblings import Absence, ends_of_siblings
from ..end_together.watch import Watch
from ..launchers import LauncherInfo, launcher, launcher_of
from ..launchers.srun import plugin
from ..mpi_quirks import is_open_mpi, spare_reads
from ..rendezvous.host_group import MAX_BYTES, HostGroup, check_length, pack, unpack
from ..rendezvous.meeting import meeting
from ..rendezvous.pmi import Member
from ..stopwatch import Stopwatch
from ..threads import cap_threads, cores
from .base import Job
from .multiprocess import Ticket
from .topology import Topology, host_identity
from .watched import watch_ranks

_TAG = 17_185  # the first exchange uses a communicator that the user may also use
# The other ranks wait this much longer than rank 0, which can report who is missing.
_GRACE_SECONDS = 5.0
# Interval of checks on this host's processes. An end counts only if seen twice, since mpiexec may be ending all ranks.
_LOOK_SECONDS = 0.3


class MpiJob(Job):
    """One rank of a job started by an MPI launcher; without a launcher, a job of one rank.

    Collective over `comm`.

    Args:
        comm: an mpi4py intracommunicator (default: COMM_WORLD). The job uses its own duplicate.
        host: replaces the identity of this rank's host. Ranks with the same identity share memory.

    Attributes:
        comm: the duplicate, used for setup traffic.
        ranks_of_hosts: the ranks of each host, in the order of the first of them.
        local_ranks: those of this host, this one included.
        numbers: numbers of the ranks in messages: those of the job that a subgroup is part of.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: launcher and MPI library disagree about the size of the job.
    """

    def __init__(self, comm: Any = None, *, host: str | None = None) -> None:
        MPI = start_mpi()
        _check_launcher(MPI)
        parent = MPI.COMM_WORLD if comm is None else comm
        self._settings = Settings.from_env()
        ticket = Ticket()
        mine = [host or host_identity(), host or socket.gethostname(), sorted(cores()), ticket.secret.hex()]
        packed = _all_gather_bytes(MPI, parent, json.dumps(mine).encode(), self._settings)
        identities, hosts, usable, secrets = zip(*map(_introduction, range(len(packed)), packed), strict=True)
        self.comm: Any = parent.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        rank, size = self.comm.rank, self.comm.size
        self._take_places(rank, identities, hosts)
        self.numbers = tuple(range(size))
        local = self.local_ranks
        self._ticket = Ticket(bytes.fromhex(secrets[local[0]]))
        cap_threads(len(local), [usable[peer] for peer in local])
        if size > 1:
            guard.watch(self)
        if comm is None and size > 1 and guard.others is None:
            guard.others = watch_ranks(self.topology, self.all_gather, self._settings.timeout)
            if guard.others is not None:
                guard.others.end_with_others(guard.abort)

    def _take_places(self, rank: int, identities: Sequence[str], hosts: Sequence[str]) -> None:
        """Local. Set who is where, from the identities and names of the hosts of all ranks."""
        ranks: dict[str, list[int]] = {}
        for peer, identity in enumerate(identities):
            ranks.setdefault(identity, []).append(peer)
        local = ranks[identities[rank]]
        self._identities, self.ranks_of_hosts, self.local_ranks = identities, list(ranks.values()), local
        self.topology = Topology(rank, len(hosts), local.index(rank), len(local), tuple(hosts))

    def subgroup(self, ranks: Sequence[int], secret: bytes) -> MpiJob:
        """Collective among `ranks`, which have all come. A job of these ranks alone, in that order.

        Args:
            ranks: this rank and others, each once; equal on all of them.
            secret: 16 bytes that they have in common.
        """
        self._check_open()
        made = copy(self)
        made.comm = self.comm.Create_group(self.comm.group.Incl(ranks))
        made.comm.Set_errhandler(import_mpi().ERRORS_RETURN)
        made.numbers = tuple(self.numbers[rank] for rank in ranks)
        identities, hosts = ([values[rank] for rank in ranks] for values in (self._identities, self.topology.hosts))
        made._take_places(made.comm.rank, identities, hosts)
        made._ticket = Ticket(hashlib.sha256(secret + b"%d" % made.local_ranks[0]).digest()[:16])
        made._group = None
        return made

    def all_gather(self, payload: bytes) -> list[bytes]:  # noqa: D102
        self._check_open()
        return _all_gather_bytes(import_mpi(), self.comm, payload, self._settings)

    def _meet(self) -> HostGroup:
        topology, settings = self.topology, self._settings
        absence = Absence(settings.stall_warning, all_started=True)
        return HostGroup(self._ticket.secret, topology.local_rank, topology.local_size, settings.timeout, absence)

    def close(self) -> None:
        """Local. Leave the job; idempotent. MPI itself remains initialized until the interpreter ends."""
        guard.forget(self)
        super().close()
        if self.comm is not None and not import_mpi().Is_finalized():
            self.comm.Free()
        self.comm = None


def _introduction(rank: int, data: bytes) -> tuple[str, str, list[int], str]:
    """Identity and name of the host of a rank, its cores, and a secret for the ranks of that host."""
    try:
        identity, host, usable, secret = json.loads(data)
    except (ValueError, TypeError):
        raise LaunchError(
            f"rank {rank} sent an introduction that cannot be read; install the same version of distopt everywhere"
        ) from None
    return identity, host, usable, secret


def start_mpi() -> ModuleType:
    """Collective over the launcher's job on first use. Initialize MPI; from then on, leaving early ends the whole job.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
    """
    MPI = import_mpi()
    if MPI.COMM_WORLD.size > 1:
        _core.remove_mpich_files()
        guard.arm(MPI)
    return MPI


def import_mpi() -> ModuleType:
    """Local. `mpi4py.MPI`; the first import calls MPI_Init, which is collective over the launcher's job.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: the MPI library cannot be started by this launcher, or a rank is missing.
    """
    info = launcher()
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            # A library that the launcher does not fit aborts in MPI_Init; see `finalize_at_exit`.
            mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without libmpi
        started = f" although {info.name} started this process ({info.source})" if info else ""
        raise MissingDependencyError(f"MPI cannot be used{started}: {error}; {pip_install('mpi')}") from error
    module: ModuleType = MPI
    if not module.Is_initialized():
        _initialize(module, info)
        finalize_at_exit(module)
    return module


def _initialize(MPI: Any, info: LauncherInfo | None) -> None:
    if info is None or info.size == 1:
        MPI.Init_thread()
        return
    library, started_by, place = _library(MPI), launcher_of(info), meeting(info)
    if fact := started_by.misfit(library, os.environ):
        raise LaunchError(_mismatch(info, library, fact))
    if not is_open_mpi(library):
        spare_reads(info.local_rank, info.local_size)
    if place is None or started_by.connects(library):
        with _bounded_init(info):
            MPI.Init_thread()
        return
    member = Member(info, place, Settings.from_env().timeout)
    with member.environment(), _bounded_init(info, member):
        MPI.Init_thread()
    member.end_with_others()
    guard.others = member


@contextlib.contextmanager
def _bounded_init(info: LauncherInfo, watch: Watch | None = None) -> Iterator[None]:
    """Limit the time of MPI_Init, which otherwise waits for all ranks forever and cannot be interrupted."""
    seconds = Settings.from_env().timeout
    who = f"rank {info.rank} of {info.size} on {socket.gethostname()} (pid {os.getpid()})"
    late = (
        f"{who} has waited {seconds:g} s in MPI_Init: a rank did not start, has ended or is stopped; see the ranks' "
        "output, or raise DISTOPT_TIMEOUT\n"
    )
    with ends_of_siblings() as ends:
        signs = [
            (fd, f"{who} waits in MPI_Init, and a process of this job (pid {pid}) has ended; see the output\n")
            for pid, fd in ends.items()
        ]
        if watch is not None:
            lost = "a rank of this job has ended or cannot be reached"
            signs.append((watch.fileno(), f"{who} waits in MPI_Init, and {lost}; see the output\n"))
        watchdog = _core.Watchdog(seconds, late, 1, signs)
        try:
            yield
        finally:
            watchdog.stop()
        _core.remove_mpich_files()  # before another rank's end may end this process


def _check_launcher(MPI: Any) -> None:
    """Detect a script that initialized MPI itself, without the launcher: each process would be rank 0 of 1."""
    info = launcher()
    world = MPI.COMM_WORLD
    if info is None or (info.rank, info.size) == (world.rank, world.size):
        return
    if meeting(info) is not None:
        raise LaunchError(
            f"{info.name} started this process as rank {info.rank} of {info.size} ({info.source}), but the script has "
            "imported mpi4py.MPI before distopt.launch.join, which connects the ranks; import it afterwards"
        )
    raise LaunchError(_mismatch(info, _library(MPI), f"sees rank {world.rank} of {world.size}"))


def _mismatch(info: LauncherInfo, library: str, fact: str) -> str:
    return (
        f"{info.name} started this process as rank {info.rank} of {info.size} ({info.source}), but the MPI library in "
        f"use ({library}) {fact}; start the job with the mpiexec of that library (under Slurm: "
        f"srun --mpi={plugin(library)}), or install the mpi4py and MPI library of that "
        "launcher"
    )


def _library(MPI: Any) -> str:
    return " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split())


# -- set-up: a few bytes per rank through rank 0, always with a timeout ------------------------------------------------
def _all_gather_bytes(mpi: Any, comm: Any, payload: bytes, settings: Settings) -> list[bytes]:
    """Collective over `comm`. The payload of every rank, in rank order; lengths may differ.

    MPI's own collectives cannot be cancelled and do not report which rank is missing. This therefore polls for
    point-to-point messages of known length. Nothing that a peer sends is unpickled.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: an intracommunicator.
        payload: at most 16 MiB.
        settings: timeout, and delay of the warning.

    Raises:
        LaunchError: a rank did not take part in time; the message names it.
    """
    check_length(payload)
    if comm.size == 1:
        return [payload]
    if comm.rank != 0:
        _send(mpi, comm, settings, payload, [0], settings.timeout)
        message = _receive(mpi, comm, settings, [0], settings.timeout + _GRACE_SECONDS)[0]
        return unpack(message, comm.size)
    others = range(1, comm.size)
    received = _receive(mpi, comm, settings, others, settings.timeout)
    payloads = [payload, *(received[rank] for rank in others)]
    _send(mpi, comm, settings, pack(payloads), others, settings.timeout)
    return payloads


def _send(mpi: Any, comm: Any, settings: Settings, message: bytes, ranks: Sequence[int], seconds: float) -> None:
    requests = {rank: comm.Isend([message, mpi.BYTE], rank, _TAG) for rank in ranks}
    wait = _Wait(comm, settings, seconds)
    while requests:
        requests = {rank: request for rank, request in requests.items() if not request.Test()}
        wait.step(list(requests))


def _receive(mpi: Any, comm: Any, settings: Settings, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
    status = mpi.Status()
    received: dict[int, bytes] = {}
    absent = list(ranks)
    wait = _Wait(comm, settings, seconds)
    while absent:
        for rank in absent:
            message = comm.Improbe(rank, _TAG, status)
            if message is not None:
                count = status.Get_count(mpi.BYTE)
                if not 0 <= count <= MAX_BYTES * comm.size:
                    raise LaunchError(
                        f"rank {rank} sent a message that cannot be read; use the same version of distopt everywhere"
                    )
                buffer = bytearray(count)
                message.Recv([buffer, mpi.BYTE])
                received[rank] = bytes(buffer)
        absent = [rank for rank in absent if rank not in received]
        wait.step(absent)
    return received


class _Wait:
    """A wait for other ranks: sleeps, warns once, and raises on timeout."""

    def __init__(self, comm: Any, settings: Settings, seconds: float) -> None:
        self._comm = comm
        self._seconds = seconds
        self._watch = Stopwatch()
        self._absence = Absence(min(settings.stall_warning, seconds / 2))
        self._look_at = 0.0

    def step(self, absent: Sequence[int]) -> None:
        if not absent:
            return
        waited = self._watch.seconds()
        noun = "ranks" if len(absent) > 1 else "rank"
        who = (
            f"rank {self._comm.rank} (pid {os.getpid()}) waits in the set-up of the job for {noun} "
            f"{', '.join(map(str, absent))} of {self._comm.size}"
        )
        if waited > self._seconds:
            raise LaunchError(f"{who}, for {waited:.1f} s; see the output of those processes")
        if waited > self._look_at:
            self._look_at = waited + _LOOK_SECONDS
            # MPI_Finalize is collective, so none ends before all have met, however many are left.
            self._absence.check(who, math.inf, patience=_LOOK_SECONDS / 2)
        time.sleep(min(1e-3, waited / 8))
