"""mpiexec of MPICH, and of Intel MPI, which sets the same variables. Tried: MPICH 5.0.2."""

from __future__ import annotations

from collections.abc import Mapping

from ..mpi_quirks import is_open_mpi
from .base import Launcher, LauncherInfo
from .srun import SRUN


class Mpich(Launcher):
    """mpiexec of MPICH or Intel MPI, by the variables of its process manager, Hydra."""

    name = "mpiexec of MPICH or Intel MPI"
    rank, size = "PMI_RANK", "PMI_SIZE"
    local_rank, local_size = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    prefixes = ("PMI_", "MPI_LOCAL", "HYDI_")

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view of the process; None for tasks of srun --mpi=pmi2, which have these variables, too."""
        info = super().read(env)
        task = SRUN.read(env) if info is not None and "PMI_JOBID" in env else None
        return None if info is not None and task is not None and task.agrees(info) else info

    def misfit(self, library: str, env: Mapping[str, str]) -> str:
        """Why ranks with this MPI library cannot be connected; Open MPI does not fit."""
        return "cannot be started by it" if is_open_mpi(library) else ""
