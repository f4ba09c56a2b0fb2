"""Memory of an agent, where its ranks keep their states: memory files that outlive the ranks.

Each rank has slots for copies of its states, which it writes in turns: two, on several nodes three, since the copy
whose own states have gone to the next node stays. Two more take its own states after each step, also in turns. A slot's
header says to which step the states belong, and is written after the rest: it makes the slot valid. If a rank is
killed before, the other slot counts.

Three files of the agent take what its ranks share, when they give their live states before they end: never the one from
which they have resumed, and else by the step. Another file holds the own states that the agent of the node before has
sent. An eventfd, when it can be read, asks the ranks for their live states.

`distopt.checkpoint.memory` writes and reads the slots, `distopt.checkpoint.live` the files of the agent.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

VARIABLE = "DISTOPT_STATE_SLOTS"  # in the ranks: the descriptors of all slots of their agent
# The newest step done; whether the own states go to the next node, see below; where these end; the length of the JSON
# that follows the header, in bytes; a number that is another for each of two successive states, or 0 for none. It comes
# last, since it validates the rest.
HEADER = struct.Struct("<QQQQQ")
POST_AT = 8  # where the second stands
STAYS, TO_SEND, SENT = range(3)  # what it says
LENGTH = struct.Struct("<Q")  # in the file of the node before: precedes each part
_N_STEP_SLOTS, _N_GIFTS = 2, 3


def seconds_to_give(n_bytes: int) -> float:
    """How long ranks may take to give so many bytes of live states."""
    return max(2.0, n_bytes / 250e6)


class SlotFds(NamedTuple):
    """The descriptors of an agent's files.

    Attributes:
        copies: of each rank, its slots for copies.
        steps: of each rank, those for its own states after a step.
        gifts: the files for live states.
        before: the file with own states of the node before.
        asks: the eventfd.
    """

    copies: list[list[int]]
    steps: list[list[int]]
    gifts: list[int]
    before: int
    asks: int

    @classmethod
    def of_env(cls, env: Mapping[str, str]) -> SlotFds | None:
        """The descriptors that the variable names; None if it is not set."""
        numbers = [list(map(int, part.split())) for part in env.get(VARIABLE, "").split(",") if part.strip()]
        if not numbers:
            return None
        (before, asks), gifts, *ranks = numbers
        return cls(
            [each[:-_N_STEP_SLOTS] for each in ranks], [each[-_N_STEP_SLOTS:] for each in ranks], gifts, before, asks
        )

    def __str__(self) -> str:
        """The value of the variable."""
        ranks = [copies + steps for copies, steps in zip(self.copies, self.steps, strict=True)]
        return ",".join(" ".join(map(str, part)) for part in ([self.before, self.asks], self.gifts, *ranks))

    @property
    def all(self) -> list[int]:
        """All of them."""
        return [self.before, self.asks, *self.gifts, *(fd for each in (*self.copies, *self.steps) for fd in each)]


def state_slots_in(env: Mapping[str, str]) -> list[int]:
    """The descriptors that the variable names; none if it is not set."""
    fds = SlotFds.of_env(env)
    return [] if fds is None else fds.all


class StateSlots:
    """The files of an agent.

    Args:
        n_ranks: number of ranks.
        n_copies: number of slots for copies of each rank.

    Attributes:
        fds: their descriptors.
    """

    def __init__(self, n_ranks: int, n_copies: int = 2) -> None:
        def files(count: int) -> list[int]:
            return [os.memfd_create("distopt states") for _ in range(count)]

        self.fds = SlotFds(
            [files(n_copies) for _ in range(n_ranks)],
            [files(_N_STEP_SLOTS) for _ in range(n_ranks)],
            files(_N_GIFTS),
            files(1)[0],
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
        )
        self._is_closed = False

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that names the slots to the ranks."""
        return {VARIABLE: str(self.fds)}

    @property
    def steps(self) -> list[int]:
        """The newest step that each rank has done, its states kept or not; 0: none."""
        return [max(_step_done(fd) for fd in (*copies, *steps)) for copies, steps in zip(*self.fds[:2], strict=True)]

    def ask(self) -> None:
        """Ask all ranks for their live states, until `start`."""
        os.eventfd_write(self.fds.asks, 1)

    def start(self, parts: Iterable[bytes]) -> None:
        """Prepare the start of ranks: ask for nothing, and show them these states of ranks of the node before."""
        with suppress(BlockingIOError):  # nothing has been asked for
            os.eventfd_read(self.fds.asks)
        os.ftruncate(self.fds.before, 0)
        at = 0
        for part in parts:
            for content in (LENGTH.pack(len(part)), part):
                at += write_all(self.fds.before, content, at)

    def close(self) -> None:
        """Give the memory back when the last rank has ended; idempotent."""
        for fd in () if self._is_closed else self.fds.all:
            os.close(fd)
        self._is_closed = True


def _step_done(fd: int) -> int:
    return int(HEADER.unpack(os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))[0])


def parts_of(fd: int) -> Iterator[bytearray]:
    """The parts in the file of the node before."""
    at = 0
    while header := os.pread(fd, LENGTH.size, at):
        (length,) = LENGTH.unpack(header)
        yield read_all(fd, length, at + LENGTH.size)
        at += LENGTH.size + length


def write_all(fd: int, content: bytes | memoryview, at: int) -> int:
    """Write all of it at this place in a file; its length. The kernel takes 2 GiB at a time."""
    rest = memoryview(content).cast("B")
    while rest:
        done = os.pwrite(fd, rest, at)
        rest, at = rest[done:], at + done
    return memoryview(content).nbytes


def read_all(fd: int, length: int, at: int) -> bytearray:
    """So many bytes from this place in a file.

    Raises:
        EOFError: the file is shorter.
    """
    found = bytearray(length)
    rest = memoryview(found)
    while rest:
        done = os.preadv(fd, [rest], at)
        if not done:
            raise EOFError(f"a memory file ends at byte {at}")
        rest, at = rest[done:], at + done
    return found
