"""torchrun, and rank and size that a script or a user sets by hand in the same variables.

RANK and WORLD_SIZE are torchrun's only together with TORCHELASTIC_RUN_ID. Scripts also set them by hand, from
another launcher's variables, which then decide. Job scripts export a WORLD_SIZE, or a RANK of the node, that no
process of the job should mistake for its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import Launcher, LauncherInfo
from .srun import in_step

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class Torchrun(Launcher):
    """torchrun, or a script that sets RANK and WORLD_SIZE itself.

    Attributes:
        port: with `address`, the variable that names the TCP port of PyTorch's rank 0 there.
        node: the variable with the number of the node.
    """

    name = "torchrun"
    rank, size = "RANK", "WORLD_SIZE"
    local_rank = "LOCAL_RANK"
    local_size: str = "LOCAL_WORLD_SIZE"
    prefixes = ("TORCHELASTIC_",)
    address, port, node = "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"
    job_variables = (address, port, "TORCHELASTIC_RUN_ID", _ATTEMPT)

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view; None for a job script's WORLD_SIZE alone, or RANK alone in a step of srun."""
        is_alone = self.size not in env and in_step(env)
        return super().read(env) if self.rank in env and not is_alone else None

    def is_certain(self, env: Mapping[str, str]) -> bool:
        """Whether torchrun itself set the variables, and not a script."""
        return "TORCHELASTIC_RUN_ID" in env

    def attempt(self, env: Mapping[str, str]) -> int:
        """How many times the ranks have been started before; 0 if the launcher does not count that."""
        return int(env.get(_ATTEMPT, "0"))
