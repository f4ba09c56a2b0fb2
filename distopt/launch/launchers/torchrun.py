"""torchrun, and rank and size that a script or a user sets by hand in the same variables.

RANK and WORLD_SIZE are torchrun's only together with TORCHELASTIC_RUN_ID. Scripts also set them by hand, from another
launcher's variables, and that launcher then counts. Job scripts export a WORLD_SIZE, or a RANK of the node, that no
process of the job should mistake for its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..mpi_quirks import is_open_mpi
from .base import Launcher, LauncherInfo
from .srun import in_step


class Torchrun(Launcher):
    """torchrun, or a script that sets RANK and WORLD_SIZE itself."""

    name = "torchrun"
    rank, size = "RANK", "WORLD_SIZE"
    local_rank, local_size = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    prefixes = ("TORCHELASTIC_",)
    job_variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    address = "MASTER_ADDR"

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """Local. See `Launcher.read`; None for a job script's WORLD_SIZE alone, or RANK alone in a step of srun."""
        is_alone = self.size not in env and in_step(env)
        return super().read(env) if self.rank in env and not is_alone else None

    def is_certain(self, env: Mapping[str, str]) -> bool:  # noqa: D102
        return "TORCHELASTIC_RUN_ID" in env

    def misfit(self, library: str, env: Mapping[str, str]) -> str:  # noqa: D102
        return "cannot connect ranks that no mpiexec started, as MPICH can" if is_open_mpi(library) else ""
