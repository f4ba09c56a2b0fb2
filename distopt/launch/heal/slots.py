"""Memory of an agent in which its ranks keep their states: two slots for each, which it writes in turns.

On several nodes there is a third: one of them stays until the next states have also gone to another node.
A slot is a memory file, whose header says to which step the states belong, and counts once the rest has been written.
A rank may be killed in between. Then the other slot counts. `distopt.checkpoint.memory` writes and reads them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

VARIABLE = "DISTOPT_SLOTS"  # of ranks: the descriptors of all slots of their agent, which they inherit
# The newest step done; bytes of the JSON that follows; last, since it validates the rest, the step of the states and 1,
# or 0.
HEADER = struct.Struct("<QQQ")


def slots_in(env: Mapping[str, str]) -> list[int]:
    """Local. The descriptors that the variable says; none without it."""
    return [int(fd) for fd in env.get(VARIABLE, "").split()]


class Slots:
    """The slots of all ranks of an agent.

    Args:
        n_ranks: number of ranks.
        n_slots: of each.

    Attributes:
        fds: of the files, those of a rank together.
    """

    def __init__(self, n_ranks: int, n_slots: int = 2) -> None:
        self._n_slots = n_slots
        self.fds = [os.memfd_create("distopt states") for _ in range(n_slots * n_ranks)]

    @property
    def variable(self) -> dict[str, str]:
        """Local. The variable for the ranks."""
        return {VARIABLE: " ".join(map(str, self.fds))}

    @property
    def steps(self) -> list[int]:
        """Local. The newest step that each rank has done, its states kept or not; 0: none."""
        headers = (os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0") for fd in self.fds)
        done = [step for step, _, _ in map(HEADER.unpack, headers)]
        return [max(done[at : at + self._n_slots]) for at in range(0, len(done), self._n_slots)]

    def close(self) -> None:
        """Local. Give the memory back when the last rank has ended."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []
