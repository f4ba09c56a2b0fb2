"""Memory of an agent, where its ranks keep their states: two slots for each rank, which it writes in turns.

On several nodes there is a third: one of them stays until the next states have also gone to another node.
A slot is a memory file. Its header says to which step the states belong, and is written after the rest: it makes the
slot valid. If a rank is killed before, the other slot counts. `distopt.checkpoint.memory` writes and reads them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

VARIABLE = "DISTOPT_STATE_SLOTS"  # in the ranks: the descriptors of all slots of their agent
# The newest step done; the length of the JSON that follows, in bytes; the step of the states plus 1, or 0 for none. It
# comes last, since it validates the rest.
HEADER = struct.Struct("<QQQ")


def state_slots_in(env: Mapping[str, str]) -> list[int]:
    """The descriptors that the variable names; none if it is not set."""
    return [int(fd) for fd in env.get(VARIABLE, "").split()]


class StateSlots:
    """The slots of all ranks of an agent.

    Args:
        n_ranks: number of ranks.
        n_slots: number of slots of each rank.

    Attributes:
        fds: the descriptors of the files, rank by rank.
    """

    def __init__(self, n_ranks: int, n_slots: int = 2) -> None:
        self._n_slots = n_slots
        self.fds = [os.memfd_create("distopt states") for _ in range(n_slots * n_ranks)]

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that names the slots to the ranks."""
        return {VARIABLE: " ".join(map(str, self.fds))}

    @property
    def steps(self) -> list[int]:
        """The newest step that each rank has done, its states kept or not; 0: none."""
        headers = (os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0") for fd in self.fds)
        done = [step for step, _, _ in map(HEADER.unpack, headers)]
        return [max(done[at : at + self._n_slots]) for at in range(0, len(done), self._n_slots)]

    def close(self) -> None:
        """Give the memory back when the last rank has ended."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []
