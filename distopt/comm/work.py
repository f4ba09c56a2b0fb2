"""Handles of collectives and messages in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray


class Work(ABC):
    """A collective under way. Results are valid, and inputs may be changed, after `wait` returns."""

    @abstractmethod
    def done(self) -> bool:
        """Local. Move the operation forward without waiting; return whether it has finished.

        A poll has no time-out, and does not notice a lost peer: a loop of polls needs its own limit, and then waits.
        """

    @property
    def nonfinite(self) -> tuple[int, int] | None:
        """Local, after `wait`. The result of `find_nonfinite` of `Communicator.all_reduce`; None without it."""
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


class MessageWork(Work):
    """A message under way. Any number may be, and they may be waited for in any order."""

    @property
    @abstractmethod
    def source(self) -> int:
        """Local. The rank that sent the message, once it has arrived; before, -1."""


class RaggedWork(Work):
    """A collective whose counts only the ranks together know.

    `wait` is collective: it may start a second collective, so all ranks call it in the same order relative to other
    collectives. `done` is local: it never starts one, and returns whether all that has been started has arrived.

    Attributes:
        parts: flat arrays, one from every rank, in rank order. Valid after `wait`; the caller's own.
    """

    parts: list[Array]

    def __init__(self, work: Work, parts: list[Array]) -> None:
        """Local. `work` fills the list `parts` by the time it has finished."""
        self.parts = parts
        self._work = work

    def done(self) -> bool:
        """Local. Whether all that has been started has arrived; see the class."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> None:
        """Collective. Wait for `parts`; see the class and `Work.wait`."""
        self._work.wait(timeout)
