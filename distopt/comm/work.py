"""Collectives under way, as the caller sees them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Array", "DoneWork", "GatheredParts", "MessageWork", "RaggedWork", "Work", "Works"]

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray


class Work(ABC):
    """A collective under way. Results are valid, and inputs may be changed, after `wait` returns."""

    @abstractmethod
    def done(self) -> bool:
        """Local. Move the operation forward without waiting; whether it has finished."""

    @property
    def nonfinite(self) -> tuple[int, int] | None:
        """Local, after `wait`. What `find_nonfinite` of `Communicator.all_reduce` has found, else None."""
        return None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds (default: `Settings.timeout`).

        Raises:
            PeerLostError: a peer process has ended; raised within a second of it.
            StalledError: a peer is alive but did not arrive in time.
            MismatchError: the ranks called different collectives.
        """


class DoneWork(Work):
    """An operation that was finished when it was started."""

    def done(self) -> bool:
        """Local. True."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class Works(Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        """Local. Move all forward; whether all have finished."""
        states = [work.done() for work in self._works]  # a list, so that every one moves forward
        return all(states)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all of them, at most `timeout` seconds; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class MessageWork(Work):
    """A message under way. Any number may be, and they may be waited for in any order."""

    @property
    @abstractmethod
    def source(self) -> int:
        """Local. The rank that a message came from, once it has ended; before, -1."""


class RaggedWork(Work):
    """A collective whose counts only the ranks together know.

    `wait` is collective: it may start a second collective, so all ranks call it in the same order relative to other
    collectives. `done` is local: it never starts one, and tells whether what has been started so far has arrived.

    Attributes:
        parts: flat arrays, one from every rank, in rank order. Valid after `wait`; the caller's own.
    """

    parts: list[Array]

    def __init__(self, work: Work, parts: list[Array]) -> None:
        """Local. `work` fills the list `parts` by the time it has finished."""
        self.parts = parts
        self._work = work

    def done(self) -> bool:
        """Local. Whether what has been started so far has arrived; see the class."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> None:
        """Collective. Wait for `parts`; see the class and `Work.wait`."""
        self._work.wait(timeout)


class GatheredParts(RaggedWork):
    """An all_to_all in which everything goes to everyone: the lengths of all parts, and the parts in a row."""

    def __init__(self, rank: int, lengths: RaggedWork, rows: RaggedWork) -> None:
        super().__init__(Works([lengths, rows]), [])
        self._rank = rank
        self._gathered = lengths, rows

    def wait(self, timeout: float | None = None) -> None:
        """Collective. See `RaggedWork.wait`."""
        super().wait(timeout)
        if not self.parts:
            lengths, rows = (work.parts for work in self._gathered)
            self.parts = [
                np.split(row, np.cumsum(cuts)[:-1])[self._rank].copy() for cuts, row in zip(lengths, rows, strict=True)
            ]
