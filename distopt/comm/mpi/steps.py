"""What operations over MPI are made of: the exchange, data inside it, and requests of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .fingerprint import FINGERPRINT_BYTES, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ..base import Array, Work

__all__ = ["Chain", "Exchange", "Inline", "LocalRequest", "MpiGroup"]


@dataclass(frozen=True)
class MpiGroup:
    """Ranks that exchange data, with one MPI communicator for each of two steps."""

    rank: int
    size: int
    first: Any
    second: Any

    def free(self) -> None:
        """Collective. Give up the communicators, which must be idle."""
        self.first.Free()
        self.second.Free()


class LocalRequest:
    """A work of another communicator as a step."""

    def __init__(self, work: Work) -> None:
        self.Test = work.done


class Chain:
    """Several requests as one step, each started when the one before has ended.

    A later operation enters the step when the last has started, so the order of calls is the same on all ranks.
    """

    def __init__(self, parts: Iterable[Iterator[Any]]) -> None:
        """Collective. `parts` give out one request each; the first starts here."""
        self._waiting = deque(parts)
        self._start_next()

    @property
    def all_started(self) -> bool:
        """Local. Whether later operations may enter the step."""
        return not self._waiting

    def Test(self) -> bool:  # noqa: N802 - as of MPI's requests
        """Start what can be started; whether all requests have ended. Not to be called again then."""
        while self._request.Test():
            next(self._part, None)  # what follows the request
            if not self._waiting:
                return True
            self._start_next()
        return False

    def _start_next(self) -> None:
        self._part = self._waiting.popleft()
        self._request = next(self._part)


@dataclass(frozen=True)
class Inline:
    """Small data, which travel with the fingerprint.

    Attributes:
        payload: what this rank sends; read when the operation begins. Empty, if it does not fit.
        finish: is given the exchange when it has ended.
    """

    payload: Array
    finish: Callable[[Exchange], None]


class Exchange:
    """One gather of a block of fixed size from every rank: a fingerprint, and data that are small enough.

    Fixed, because ranks that are about to find out that they disagree must not disagree about the size already.
    """

    def __init__(self, comm: Any, byte: Any, inline_bytes: int) -> None:
        """Local. Memory for an exchange on the MPI communicator `comm`; `byte` is MPI.BYTE."""
        self._start = comm.Iallgather
        self._mine = np.zeros(FINGERPRINT_BYTES + inline_bytes, np.uint8)
        self._theirs = np.zeros((comm.size, self._mine.size), np.uint8)
        self._arguments = [self._mine, byte], [self._theirs, byte]

    def start(self, fingerprint: bytes, payload: Array | None) -> Any:
        """Collective. Start the exchange; the MPI request."""
        view = self._mine.data
        view[:FINGERPRINT_BYTES] = fingerprint
        if payload is not None:
            self._mine[FINGERPRINT_BYTES : FINGERPRINT_BYTES + payload.nbytes] = payload.reshape(-1).view(np.uint8)
        return self._start(*self._arguments)

    def fingerprints(self) -> list[bytes]:
        """Local. Those of all ranks, in rank order."""
        view = self._theirs.reshape(-1).data
        return [bytes(view[at : at + FINGERPRINT_BYTES]) for at in range(0, len(view), self._mine.size)]

    def counts(self) -> list[int]:
        """Local. The counts that the ranks gave, in rank order."""
        return [Fingerprint.unpack(theirs).count for theirs in self.fingerprints()]

    def payloads(self, dtype: Any, counts: Sequence[int]) -> list[Array]:
        """Local. The data of all ranks, in rank order; views, valid until the operation ends."""
        return [
            np.frombuffer(self._theirs, dtype, count, r * self._mine.size + FINGERPRINT_BYTES)
            for r, count in enumerate(counts)
        ]
