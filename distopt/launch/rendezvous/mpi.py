"""MPI_Init under the launchers that connect MPI's ranks: mpiexec, and srun with the plugin for the MPI library.

Only this module and `distopt.comm.net.communicator` import mpi4py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ... import _core
from ...errors import LaunchError, MissingDependencyError, pip_install
from ...settings import Settings
from ..end_together.exit_guard import finalize_at_exit, guard
from ..end_together.siblings import ends_of_siblings
from ..launchers import LauncherInfo, launcher, launcher_of
from ..launchers.srun import plugin
from ..mpi_quirks import is_open_mpi, library_of, remove_shared_files, spare_reads
from ..words import this_rank
from .meeting import meeting


def start_mpi() -> ModuleType:
    """Collective over the launcher's job on first use. Initialize MPI; from then on, leaving early ends the whole job.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: the MPI library cannot be started by this launcher, a rank is missing, or MPI has been finalized.
    """
    MPI = import_mpi()
    if MPI.Is_finalized():
        info = launcher()
        raise LaunchError(
            f"rank {info.rank if info else 0} on {socket.gethostname()} (pid {os.getpid()}) has called MPI_Finalize, "
            "after which it can join no job and make no communicator; leave that call to distopt, at the script's end"
        )
    if MPI.COMM_WORLD.size > 1:
        remove_shared_files()
        guard.arm(MPI)
    return MPI


def is_mpi_job(info: LauncherInfo | None) -> bool:
    """Local. Whether MPI connects the ranks of a job of several hosts: mpiexec, or srun's plugin for the MPI library.

    Args:
        info: the launcher's view of this process; without a launcher, MPI makes a job of one rank.

    Raises:
        LaunchError: variables that the launcher sets are missing.
    """
    if info is None or (met := meeting(info)) is None:
        return True
    return not met.one_host and launcher_of(info).connects(_installed, os.environ)


def _installed() -> str:
    """The MPI library's description of its version; empty if none can be loaded."""
    try:
        return library_of(_load())
    except (ImportError, RuntimeError):
        return ""


def import_mpi() -> ModuleType:
    """`mpi4py.MPI`; the first import calls MPI_Init, which is collective over the launcher's job.

    Raises:
        MissingDependencyError: mpi4py or the MPI library is missing.
        LaunchError: the MPI library cannot be started by this launcher, or a rank is missing.
    """
    info = launcher()
    try:
        module = _load()
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without libmpi
        started = f" although {info.name} started this process ({info.source})" if info else ""
        raise MissingDependencyError(f"MPI cannot be used{started}: {error}; {pip_install('mpi')}") from error
    if not module.Is_initialized():
        _initialize(module, info)
        finalize_at_exit(module)
    return module


def _load() -> ModuleType:
    """The module mpi4py.MPI. Raises ImportError without mpi4py, and RuntimeError without an MPI library."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        # MPI_Init aborts if the library does not fit the launcher; see `finalize_at_exit`.
        mpi4py.rc(initialize=False, finalize=False)
    from mpi4py import MPI

    module: ModuleType = MPI
    return module


def _initialize(MPI: Any, info: LauncherInfo | None) -> None:
    if info is None or info.size == 1:
        MPI.Init_thread()
        return
    library = library_of(MPI)
    if fact := launcher_of(info).misfit(library, os.environ):
        raise LaunchError(_mismatch(info, library, fact))
    if not is_open_mpi(library):
        spare_reads(info.local_rank, info.local_size)
    with _bounded_init(info):
        MPI.Init_thread()


@contextlib.contextmanager
def _bounded_init(info: LauncherInfo) -> Iterator[None]:
    """Limit the time of MPI_Init, which otherwise waits for all ranks forever and cannot be interrupted."""
    seconds = Settings.from_env().timeout
    who = this_rank(info.rank, info.size)
    late = (
        f"{who} has waited {seconds:g} s in MPI_Init: a rank did not start, has ended or is stopped; see the ranks' "
        "output, or raise DISTOPT_TIMEOUT\n"
    )
    with ends_of_siblings() as ends:
        signs = [
            (fd, f"{who} waits in MPI_Init, and a process of this job (pid {pid}) has ended; see the output\n")
            for pid, fd in ends.items()
        ]
        watchdog = _core.Watchdog(seconds, late, 1, signs)
        try:
            yield
        finally:
            watchdog.stop()
        remove_shared_files()  # before another rank's end may end this process


def check_launcher(MPI: Any) -> None:
    """Detect a script that initialized MPI itself, without the launcher: each process would be rank 0 of 1."""
    info = launcher()
    world = MPI.COMM_WORLD
    if info is None or (info.rank, info.size) == (world.rank, world.size):
        return
    raise LaunchError(_mismatch(info, library_of(MPI), f"sees rank {world.rank} of {world.size}"))


def _mismatch(info: LauncherInfo, library: str, fact: str) -> str:
    return (
        f"{info.name} started this process as rank {info.rank} of {info.size} ({info.source}), but the MPI library in "
        f"use ({library}) {fact}; start the job with the mpiexec of that library (under Slurm: "
        f"srun --mpi={plugin(library)}), or install the mpi4py and MPI library of that launcher"
    )
