"""Where the ranks of a benchmark run, and how they are started there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .crew import mpi_command

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Site"]


class Site:
    """All ranks run on this host. Subclasses say otherwise.

    Attributes:
        world_size: number of ranks.
        described: what to say of the place besides their number.
    """

    described = ""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the ranks need there."""
        return {}

    def by_mpi(self, mpiexec: str, *, open_mpi: bool) -> list[str]:
        """The words in front of a rank's command with which this mpiexec starts all ranks."""
        return mpi_command(mpiexec, self.world_size, open_mpi=open_mpi)

    def by_hand(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` as one rank, without MPI."""
        return list(command)
