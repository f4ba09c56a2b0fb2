"""The launcher's view of this process, from one table of environment variables.

The table is ordered from the innermost launcher outwards. Slurm's variables describe the task that srun started, which
may be the daemon of mpiexec or torchrun. Slurm is therefore checked last, and only inside a step of srun: an sbatch
script, and the shell of salloc, have SLURM_PROCID=0 and SLURM_NTASKS=n although they are not one of n ranks.

RANK and WORLD_SIZE are torchrun's only together with TORCHELASTIC_RUN_ID. Scripts also set them by hand, from another
launcher's variables, and that launcher then counts. Job scripts export a WORLD_SIZE, or a RANK of the node, that no
process of the job should mistake for its own. `distopt run` sets the variables of torchrun, and gives its own name to
the job in DISTOPT_RUN_ID; a torchrun within would give it another in TORCHELASTIC_RUN_ID.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import LaunchError

RUN = "distopt run"
_INTERACTIVE_STEP = "4294967290"  # of the shell of salloc; SLURM_INTERACTIVE_STEP of slurm.h


@dataclass(frozen=True)
class LauncherInfo:
    """The launcher's view of this process; unknown values are None.

    Attributes:
        name: name of the launcher, for messages.
        rank: rank in the job.
        size: number of ranks in the job.
        local_rank: rank among the processes on this host.
        local_size: number of ranks on this host.
        source: the variables read, as "NAME=value NAME=value", for messages.
    """

    name: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str


@dataclass
class Origin:
    """The place of this process in a job, as known before it joins one.

    Attributes:
        invitation: ticket, rank and world size of the job whose `main` or `spawn` started this process, if one did.
        place: rank and world size, if `main` runs its function in this process, as a rank of a launcher's job.
        tickets: the secrets of the tickets made here, and by which process: this one or one that it was forked from.
    """

    invitation: tuple[Any, int, int] | None = None
    place: tuple[int, int] | None = None
    tickets: dict[bytes, int] = field(default_factory=dict)


origin = Origin()


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher(
        "mpiexec of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM = _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None)


def launcher(env: Mapping[str, str] | None = None) -> LauncherInfo | None:
    """Local. The launcher that started this process, or None for a process started by hand.

    Args:
        env: the environment (default: that of the process).

    Raises:
        LaunchError: a variable has an invalid value, or two launchers disagree.
    """
    env = os.environ if env is None else env
    task = _read(_SLURM, env)
    found = [info for entry in _LAUNCHERS if (info := _read(entry, env))]
    if task is not None and "PMI_JOBID" in env:  # srun --mpi=pmi2 numbers its tasks in MPICH's variables, too
        found = [info for info in found if info.name == _TORCHRUN.name or not _agree(info, task)]
    if not found:
        return task
    first, *others = found
    for other in others:
        if not _agree(first, other):
            raise LaunchError(
                f"two launchers disagree about this process: {first.source} ({first.name}) and {other.source} "
                f"({other.name}); unset the variables of the one that did not start this job"
            )
    if first.name != _TORCHRUN.name:
        return first
    if "TORCHELASTIC_RUN_ID" not in env:
        return next((info for info in (*others, task) if info is not None and _agree(info, first)), first)
    return replace(first, name=RUN) if env.get("DISTOPT_RUN_ID") == env["TORCHELASTIC_RUN_ID"] else first


def _agree(one: LauncherInfo, other: LauncherInfo) -> bool:
    return (one.rank, one.size) == (other.rank, other.size)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Local. Set variables for a while, which processes that are started then inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def unstarted_tasks(env: Mapping[str, str] | None = None) -> int:
    """Local. The tasks of the Slurm job whose script runs this process outside any step; 0 elsewhere."""
    env = os.environ if env is None else env
    tasks = env.get("SLURM_NTASKS", "")
    return int(tasks) if not _in_step(env) and tasks.isascii() and tasks.isdigit() else 0


def _in_step(env: Mapping[str, str]) -> bool:
    return env.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP


def _read(entry: _Launcher, env: Mapping[str, str]) -> LauncherInfo | None:
    if entry.rank not in env and entry.size not in env:
        return None
    if entry is _SLURM and not _in_step(env):
        return None
    if entry is _TORCHRUN and (entry.rank not in env or (entry.size not in env and _in_step(env))):
        return None
    names = [entry.rank, entry.size, entry.local_rank, *([entry.local_size] if entry.local_size else [])]
    source = " ".join(f"{name}={env[name]}" for name in names if name in env)
    cure = f"start the job with {entry.name}, or unset these variables"
    for here, missing in ((entry.rank, entry.size), (entry.size, entry.rank)):
        if missing not in env:
            raise LaunchError(f"{here}={env[here]!r} is set but {missing} is not; {cure}")
    values = {name: _number(name, env[name], cure) for name in names if name in env}
    rank, size = values[entry.rank], values[entry.size]
    local_rank = values.get(entry.local_rank)
    local_size = values.get(entry.local_size) if entry.local_size else None
    if not rank < size:
        raise LaunchError(f"{source}: the rank is not below the number of ranks; {cure}")
    if (local_size is not None and not 0 < local_size <= size) or (
        local_rank is not None and not local_rank < (size if local_size is None else local_size)
    ):
        raise LaunchError(f"{source}: the numbers of this host do not fit those of the job; {cure}")
    return LauncherInfo(entry.name, rank, size, local_rank, local_size, source)


def _number(name: str, text: str, cure: str) -> int:
    # int() alone would accept "1_0", " 1" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise LaunchError(f"{name}={text!r} is not a number of ranks; {cure}")
    return int(text)
