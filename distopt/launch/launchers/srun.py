"""srun of Slurm.

Its variables describe the task that srun started, which may be the daemon of mpiexec or torchrun. They count only
inside a step of srun: an sbatch script, and the shell of salloc, have SLURM_PROCID=0 and SLURM_NTASKS=n although they
are not one of n ranks. srun connects the ranks of an MPI library by the plugin for it, if it was started with that one.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache

from ..mpi_quirks import is_open_mpi
from .base import Launcher, LauncherInfo

_INTERACTIVE_STEP = "4294967290"  # the shell of salloc; SLURM_INTERACTIVE_STEP in slurm.h
_VARIABLES_OF_PLUGINS = {"pmix": "PMIX_RANK", "pmi2": "PMI_RANK"}


class Srun(Launcher):
    """srun, by the variables that Slurm sets for each task of a step."""

    name = "srun"
    rank, size, local_rank = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
    may_start_launchers = True
    job_variables = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    address = "SLURM_STEP_NODELIST"

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view of the process; None outside a step."""
        return super().read(env) if in_step(env) else None

    def one_host(self, info: LauncherInfo, env: Mapping[str, str]) -> bool:
        """Whether the step has one node."""
        return env.get("SLURM_STEP_NUM_NODES") == "1"

    def host_of_rank_0(self, env: Mapping[str, str]) -> str:
        """The first name of Slurm's compressed list: node[07-12,20],other gives node07."""
        nodes = env[self.address]
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
        return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)

    def connects(self, library: Callable[[], str], env: Mapping[str, str]) -> bool:
        """Whether srun connects the ranks for the MPI library; it is not loaded for a step without a plugin."""
        has_plugin = any(name in env for name in _VARIABLES_OF_PLUGINS.values())
        return has_plugin and bool(found := library()) and not self.misfit(found, env)

    def misfit(self, library: str, env: Mapping[str, str]) -> str:
        """Why ranks with this MPI library cannot be connected; a library needs the plugin for it."""
        return "" if _VARIABLES_OF_PLUGINS[plugin(library)] in env else "needs an MPI plugin of srun"


SRUN = Srun()


def plugin(library: str) -> str:
    """The value of srun's option --mpi for an MPI library."""
    return "pmix" if is_open_mpi(library) else "pmi2"


def in_step(env: Mapping[str, str]) -> bool:
    """Whether a process with these variables is a task of srun, or of one that it started."""
    return env.get("SLURM_STEP_ID", _INTERACTIVE_STEP) != _INTERACTIVE_STEP


def unstarted_tasks(env: Mapping[str, str]) -> int:
    """The tasks of the Slurm job whose script runs this process outside any step; 0 elsewhere."""
    tasks = env.get(SRUN.size, "")
    return int(tasks) if not in_step(env) and tasks.isascii() and tasks.isdigit() else 0


@cache  # once
def warn_of_unstarted_tasks() -> None:
    """Warn that this process trains alone, although its Slurm job has more tasks."""
    if (tasks := unstarted_tasks(os.environ)) > 1:
        logging.getLogger("distopt").warning(
            "this process trains alone, although its Slurm job has %d tasks; start all of them by: srun python %s",
            tasks,
            shlex.join(sys.argv),
        )
