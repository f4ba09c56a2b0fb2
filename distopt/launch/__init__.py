"""How a process learns its rank and finds the others, and how ranks start and end.

Every start ends in `join`, which makes a `Job`:

- `launch.main(train, 4)`: `supervise.spawn` starts a process for each rank and supervises them (`supervise.ranks`). A
  rank has the ticket of its parent (`job.multiprocess`).
- `distopt run`: on each node, `agents.agent` starts a program for each rank and supervises them in the same way. On
  several nodes `agents.owner`, which is part of one of the agents, decides for all.
- torchrun, srun, horovodrun, submitit and `distopt run` number the ranks by variables (`launchers`), from which the
  ranks derive a key (`rendezvous.meeting`). On one host, that is enough (`job.launched`). On several, it leads them to
  a server that rank 0 starts (`rendezvous.member`, `job.hosts`).
- mpiexec, and srun with a plugin for MPI, connect the ranks by themselves (`rendezvous.mpi`, `job.mpi`).

The ranks of one host meet in a `HostGroup`, through which they share memory (`rendezvous.host_group`). What ranks give
each other at set-up goes through one key-value client (`rendezvous.key_value`, `keys`). All connections begin with one
proof of membership (`gate`).

If a rank fails, the others end (`end_together`). A rank with a supervisor reports to it, and the supervisor ends the
others (`report`). Other ranks are connected to a server that rank 0 has started (`lifeline`, `server`), and abort MPI
(`exit_guard`). Processes that a script has started by multiprocessing find each other in /proc (`siblings`). Under
`distopt run --heal`, `agents.healing` decides whether all ranks start again, and `heal` starts them.

It imports the errors, settings, flight records and native functions of distopt; it starts without NumPy. It never knows
what ranks send or compute. Its functions are local unless they say Collective.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import LaunchError, UsageError
from .end_together import siblings
from .end_together.report import supervisor
from .job.base import Job
from .job.hosts import HostsJob
from .job.launched import LaunchedJob
from .job.mpi import MpiJob
from .job.multiprocess import MultiprocessJob, Ticket, refuse_worker
from .job.origin import origin
from .launchers import LauncherInfo, launcher
from .launchers.srun import warn_of_unstarted_tasks
from .rendezvous.meeting import meeting
from .rendezvous.mpi import is_mpi_job
from .supervise.output import open_standard_streams
from .supervise.spawn import main, spawn

__all__ = [
    "HostsJob",
    "Job",
    "LaunchedJob",
    "LauncherInfo",
    "MpiJob",
    "MultiprocessJob",
    "Ticket",
    "join",
    "launcher",
    "main",
    "rank_and_size",
    "spawn",
]

# The import of this package acts, as that of no other does. A rank may fail minutes before it joins: from here on, its
# supervisor gets the reason, and the ranks beside it know that it has run. Nothing may be opened in the place of a
# standard stream before.
open_standard_streams()
supervisor.find()
supervisor.hook()
siblings.remember()


def join(ticket: Ticket | None = None, local_rank: int | None = None, world_size: int | None = None) -> Job:
    """Collective. Join the job that this process belongs to, as one of its ranks.

    With a ticket, this is the job of the parent that made the ticket. Without one, it is the job of the `main` or
    `spawn` that started this process; else that of the launcher: an MPI job if mpiexec started the ranks, or, on
    several hosts, srun with the plugin for the MPI library; a job without MPI under torchrun, any other srun, and
    `distopt run`; else a job of one rank.

    Args:
        ticket: made by the parent; needs `local_rank` and `world_size`.
        local_rank: rank of this process in the ticket's job.
        world_size: number of processes in the ticket's job.

    Raises:
        LaunchError: the arguments or the launcher's variables contradict each other, or a rank has started this
            process by multiprocessing.
        UsageError: `ticket` is not a Ticket.
        MissingDependencyError: an MPI launcher started this process, but mpi4py or an MPI library is missing.
    """
    if ticket is None:
        refuse_worker()
    elif not isinstance(ticket, Ticket):
        raise UsageError(
            f"{ticket!r} was given where a Ticket is expected; ranks of an mpi4py communicator make a world of their "
            "own by World(MpiJob(comm)); see 'Collectives in any script' in the documentation"
        )
    if ticket is not None and origin.rank_and_size != (local_rank, world_size):
        if local_rank is None or world_size is None:
            raise LaunchError(
                f"a ticket was given with local_rank={local_rank} and world_size={world_size}; pass both numbers too"
            )
        return MultiprocessJob(ticket, local_rank, world_size)
    if ticket is None and (local_rank is not None or world_size is not None):
        raise LaunchError(
            f"local_rank={local_rank} and world_size={world_size} were given without a ticket; pass the ticket that "
            "the parent made, or none of the three to join the job of mpiexec"
        )
    if origin.invitation is not None:
        return MultiprocessJob(*origin.invitation)
    info = launcher()
    met = meeting(info) if info is not None else None
    if info is not None and met is not None and met.one_host:
        return LaunchedJob(info, met)
    if info is not None and met is not None and not is_mpi_job(info):
        return HostsJob(info, met)
    if info is None:
        warn_of_unstarted_tasks()
    if info is not None or find_spec("mpi4py") is not None:
        return MpiJob()
    return MultiprocessJob(Ticket(), 0, 1)


def rank_and_size() -> tuple[int, int]:
    """Rank and world size that the start of this process has given it, whether it joins or not; else (0, 1)."""
    if origin.invitation is not None:
        return origin.invitation[1:]
    info = launcher()
    return origin.rank_and_size or ((0, 1) if info is None else (info.rank, info.size))
