"""Memory of an agent, where its ranks keep their states: memory files that outlive the ranks.

Each rank has slots for copies of its states, which it writes in turns: two, on several nodes three, since the copy
whose own states have gone to the next node stays. Three further slots take its own states after each step, also in
turns. A slot has a file for what is the rank's own; those for copies have another one, for a share of what all ranks
have. Two words of each slot say whether its own states are to travel, and to which step the states belong: the second
word is written last, and makes the slot valid. If a rank is killed before, another slot counts.

Three files of the agent take what its ranks share, when they give their live states before they end: never the one from
which they have resumed, and else by the step. Another file holds the own states that the agent of the node before has
sent, once the ranks have ended; before, a word for each slot there says to which step the states belong that have come
last. An eventfd, when it can be read, asks the ranks for their live states.

The files have the format of checkpoints, which the agent does not know: `distopt.checkpoint.memory` writes and reads
the slots, `distopt.checkpoint.live` the files for live states.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

VARIABLE = "DISTOPT_STATE_SLOTS"  # in the ranks: the descriptors of all files of their agent
# The words of a slot. POST: whether the own states go to the next node. VALID: a number, which changes with the states;
# 0 without states.
POST, VALID = range(2)
STAYS, TO_SEND, SENT = range(3)  # values of POST
_WORD_BYTES = 8
_LENGTH = struct.Struct("<Q")  # in the file of the node before: precedes each part
# Of records, three: one node may have written ahead of a step that another has not begun, and needs the one before it.
N_RECORDS = 3
_N_GIFTS = 3
_N_ARRIVALS = 1024  # slots of the node before whose arrivals are noted


def seconds_to_give(n_bytes: int) -> float:
    """How long ranks may take to give so many bytes of live states."""
    return max(2.0, n_bytes / 250e6)


class SlotFiles(NamedTuple):
    """A slot, as agent and ranks see it.

    Attributes:
        own: descriptor of the file for the rank's own states.
        shared: of that for a share of the others; -1 in slots without.
        words: see above; they can be written.
    """

    own: int
    shared: int
    words: memoryview[int]

    @property
    def is_valid(self) -> bool:
        """Whether there are states in it."""
        return self.words[VALID] != 0


class StateFds(NamedTuple):
    """The descriptors of an agent's files.

    Attributes:
        words: the file with the words of all slots, with the newest step that each rank has done, and with `arrivals`.
        before: the file with own states of the node before.
        asks: the eventfd.
        gifts: the files for live states.
        shared: of each rank, the files of its slots for copies, for a share of what all ranks have.
        own: of each rank, the files for its own states: of the same slots, then of those for each step.
    """

    words: int
    before: int
    asks: int
    gifts: list[int]
    shared: list[list[int]]
    own: list[list[int]]

    @classmethod
    def of_env(cls, env: Mapping[str, str]) -> StateFds | None:
        """The descriptors that the variable names; None if it is not set."""
        numbers = [list(map(int, part.split())) for part in env.get(VARIABLE, "").split(",") if part.strip()]
        if not numbers:
            return None
        (words, before, asks), gifts, *ranks = numbers
        return cls(words, before, asks, gifts, ranks[::2], ranks[1::2])

    def __str__(self) -> str:
        """The value of the variable."""
        ranks = [part for of_rank in zip(self.shared, self.own, strict=True) for part in of_rank]
        return ",".join(" ".join(map(str, part)) for part in (self[:3], self.gifts, *ranks))

    @property
    def all(self) -> list[int]:
        """All of these descriptors."""
        return [*self[:3], *self.gifts, *(fd for each in (*self.shared, *self.own) for fd in each)]

    def arrivals(self) -> memoryview[int]:
        """The `VALID` words of the states that have come last, by their slots in `distopt.launch.agents.courier`."""
        return memoryview(mmap.mmap(self.words, 0)).cast("Q")[-_N_ARRIVALS:]

    def places(self) -> list[Place]:
        """The place of each rank."""
        words = memoryview(mmap.mmap(self.words, 0)).cast("Q")
        places = []
        for shared, own in zip(self.shared, self.own, strict=True):
            slots = []
            for i, fd in enumerate(own):
                slots.append(SlotFiles(fd, shared[i] if i < len(shared) else -1, words[2 * i + 1 : 2 * i + 3]))
            places.append(Place(words[:1], slots[: len(shared)], slots[len(shared) :]))
            words = words[1 + 2 * len(own) :]
        return places


class Place(NamedTuple):
    """Where a rank of an agent keeps its states.

    Attributes:
        done: one word: the newest step that it has done, its states kept or not; 0: none.
        copies: its slots for copies.
        records: those for its own states after a step.
    """

    done: memoryview[int]
    copies: list[SlotFiles]
    records: list[SlotFiles]


def state_slots_in(env: Mapping[str, str]) -> list[int]:
    """The descriptors that the variable names; none if it is not set."""
    fds = StateFds.of_env(env)
    return [] if fds is None else fds.all


class StateSlots:
    """The files of an agent.

    Args:
        n_ranks: number of ranks.
        n_copies: number of slots for copies of each rank.

    Attributes:
        fds: their descriptors.
        places: of the ranks.
        arrivals: see `StateFds`.
    """

    def __init__(self, n_ranks: int, n_copies: int = 2) -> None:
        def files(count: int) -> list[int]:
            return [os.memfd_create("distopt states") for _ in range(count)]

        words, before = files(2)
        os.ftruncate(words, (n_ranks * (1 + 2 * (n_copies + N_RECORDS)) + _N_ARRIVALS) * _WORD_BYTES)
        self.fds = StateFds(
            words,
            before,
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
            files(_N_GIFTS),
            [files(n_copies) for _ in range(n_ranks)],
            [files(n_copies + N_RECORDS) for _ in range(n_ranks)],
        )
        self.places = self.fds.places()
        self.arrivals = self.fds.arrivals()
        self._is_closed = False

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that names the files to the ranks."""
        return {VARIABLE: str(self.fds)}

    @property
    def steps(self) -> list[int]:
        """The newest step that each rank has done; 0: none."""
        return [place.done[0] for place in self.places]

    def ask(self) -> None:
        """Ask all ranks for their live states, until `start`."""
        os.eventfd_write(self.fds.asks, 1)

    def start(self, parts: Iterable[bytes]) -> None:
        """Prepare the start of ranks: ask for nothing, and show them these states of ranks of the node before."""
        with suppress(BlockingIOError):  # nothing has been asked for
            os.eventfd_read(self.fds.asks)
        for slot in range(len(self.arrivals)):
            self.arrivals[slot] = 0
        os.ftruncate(self.fds.before, 0)
        os.lseek(self.fds.before, 0, os.SEEK_SET)
        with open(self.fds.before, "wb", closefd=False) as file:
            for part in parts:
                file.write(_LENGTH.pack(len(part)))
                file.write(part)

    def close(self) -> None:
        """Give the memory back when the last rank has ended; idempotent."""
        for fd in () if self._is_closed else self.fds.all:
            os.close(fd)
        self._is_closed = True


def parts_of(fd: int) -> Iterator[memoryview]:
    """The parts in the file of the node before."""
    content, at = content_of(fd), 0
    while at < len(content):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(content, at)[0]
        yield content[begin:at]


def content_of(fd: int) -> memoryview:
    """The content of a memory file, which can be written; it must not become shorter meanwhile."""
    return memoryview(mmap.mmap(fd, 0) if os.fstat(fd).st_size else b"")
