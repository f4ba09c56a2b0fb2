"""Jobs of one host: the launcher numbers the ranks and does no more, as torchrun, srun and `distopt run` do."""

from __future__ import annotations

import atexit
import sys

from ...settings import Settings
from ..end_together.lifeline import Lifeline
from ..end_together.parent import end_with_parent
from ..launchers import LauncherInfo, launcher_of
from ..rendezvous.meeting import Meeting
from ..threads import cap_threads, cores
from .multiprocess import MultiprocessJob, Ticket
from .offer import connect_lifelines


class LaunchedJob(MultiprocessJob):
    """One rank of a job that torchrun, srun or `distopt run` started on this host alone; no MPI is needed.

    Collective.

    Args:
        info: the launcher's view of this process.
        met: how the ranks meet.

    Raises:
        LaunchError: a rank is missing or duplicated, or another user's process listens for this job.
    """

    def __init__(self, info: LauncherInfo, met: Meeting) -> None:
        self._lifeline: Lifeline | None = None
        self._has_agents = launcher_of(info).has_agents  # they end the other ranks when one fails
        super().__init__(Ticket(met.key[:16]), info.rank, info.size)

    def _settle(self) -> None:
        end_with_parent(launched=True)
        cap_threads(self.topology.world_size, self.exchange(sorted(cores())))
        if self.topology.world_size > 1 and not self._has_agents:
            self._lifeline = connect_lifelines(self, Settings.from_env().timeout)
        if self._lifeline is not None:
            self._lifeline.end_with_others()
            leave_at_exit(self._lifeline)

    def close(self) -> None:
        """Leave the job; idempotent."""
        super().close()
        if self._lifeline is not None:
            self._lifeline.leave()


def leave_at_exit(lifeline: Lifeline) -> None:
    """At the end of the interpreter, leave the job, unless an uncaught exception has ended it."""
    atexit.register(_leave, lifeline)


def _leave(lifeline: Lifeline) -> None:
    """At the end of the interpreter, leave the job, unless an uncaught exception has ended it: that is a failure."""
    if getattr(sys, "last_value", None) is None:
        lifeline.leave()
