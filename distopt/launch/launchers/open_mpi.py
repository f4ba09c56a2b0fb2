"""mpiexec of Open MPI. Tried: Open MPI 5.0.11."""

from __future__ import annotations

from collections.abc import Mapping

from ..mpi_quirks import is_open_mpi
from .base import Launcher


class OpenMpi(Launcher):
    """mpiexec of Open MPI, by the variables OMPI_COMM_WORLD_*."""

    name = "mpiexec of Open MPI"
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_rank, local_size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    prefixes = ("OMPI_COMM_WORLD_", "PMIX_")

    def misfit(self, library: str, env: Mapping[str, str]) -> str:
        """Why ranks with this MPI library cannot be connected; only Open MPI fits."""
        return "" if is_open_mpi(library) else "cannot be started by it"
