"""submitit on the local machine (`cluster="local"`), by which jobs are tried out before they go to Slurm.

In a Slurm job of submitit, srun starts the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Launcher, LauncherInfo


class Submitit(Launcher):
    """submitit's executor for one machine, by the variables that it sets for each task."""

    name = "submitit"
    rank, size, local_rank = "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"
    local_size = size
    prefixes = ("SUBMITIT_LOCAL_",)
    may_start_launchers = True
    job_variables = ("SUBMITIT_LOCAL_JOB_ID", "SUBMITIT_LOCAL_COMMAND")

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view of the process; None in the process that starts the tasks, and in a single task."""
        return super().read(env) if self.rank in env and env.get(self.size) != "1" else None
