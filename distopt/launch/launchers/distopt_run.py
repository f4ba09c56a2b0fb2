"""`distopt run`: it sets torchrun's variables, and gives its own name to the job in DISTOPT_RUN_ID.

A torchrun within would give the job another name in TORCHELASTIC_RUN_ID.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import LauncherInfo
from .torchrun import Torchrun

_RUN_ID = "DISTOPT_RUN_ID"


class DistoptRun(Torchrun):
    """`distopt run`, by torchrun's variables and DISTOPT_RUN_ID."""

    name = "distopt run"
    has_agents = True

    def is_certain(self, env: Mapping[str, str]) -> bool:
        """Whether `distopt run` set the variables; a torchrun within would have named the job anew."""
        return _RUN_ID in env and env[_RUN_ID] == env.get("TORCHELASTIC_RUN_ID")

    def read(self, env: Mapping[str, str]) -> LauncherInfo | None:
        """This launcher's view of the process; None if it has not set the variables."""
        return super().read(env) if self.is_certain(env) else None

    def variables(
        self,
        *,
        job: str,
        size: int,
        local_size: int,
        node: int,
        nodes: int,
        address: str,
        port: int,
        attempt: int,
        restarts: int,
        role: str,
    ) -> dict[str, str]:
        """The variables that all ranks of a node have in common.

        Args:
            job: name of the job, different for every start of `distopt run`.
            size: number of ranks.
            local_size: number of ranks of this node.
            node: number of this node.
            nodes: number of nodes.
            address: the host where PyTorch's rank 0 listens.
            port: the TCP port there.
            attempt: how many times the ranks have been started before.
            restarts: how many times they may be started again.
            role: torchrun's name for the ranks.
        """
        return {
            self.size: str(size),
            self.local_size: str(local_size),
            self.node: str(node),
            "GROUP_WORLD_SIZE": str(nodes),
            "ROLE_NAME": role,
            "ROLE_WORLD_SIZE": str(size),
            self.address: address,
            self.port: str(port),
            "TORCHELASTIC_RUN_ID": job,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            _RUN_ID: job,
        }

    def variables_of(self, rank: int, local_rank: int) -> dict[str, str]:
        """The variables of one rank."""
        return {self.rank: str(rank), self.local_rank: str(local_rank), "ROLE_RANK": str(rank)}


DISTOPT_RUN = DistoptRun()
