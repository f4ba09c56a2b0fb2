"""Operations under way over MPI."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import Array, Work
from .fingerprint import FINGERPRINT_BYTES, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .queue import MpiQueue

__all__ = ["Exchange", "Inline", "LocalRequest", "MpiGroup", "MpiWork", "MpiWorks"]


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


class MpiWork(Work):
    """One operation: the steps that its generator gives out, of which the exchange of fingerprints is the first.

    Attributes:
        stage: number of steps that have begun.
    """

    def __init__(
        self, queue: MpiQueue, fingerprint: bytes, arrays: Sequence[Array], steps: Iterator[Any], gate: int
    ) -> None:
        """Local. No step but the first `gate` is taken while an earlier operation uses one of `arrays`."""
        self.arrays = arrays
        self.stage = 0
        self.finished = False
        self._queue = queue
        self._fingerprint = fingerprint
        self._steps = steps
        self._gate = gate
        self._request: Any = None
        self._after = [
            earlier
            for earlier in queue.outstanding
            if any(np.may_share_memory(x, y) for x in arrays for y in earlier.arrays)
        ]

    @property
    def mine(self) -> Fingerprint:
        """What this rank says about the operation."""
        return Fingerprint.unpack(self._fingerprint)

    def advance(self, limit: float) -> None:
        """Move on, but into no step beyond number `limit`."""
        while self.stage < limit and not self.finished and (self._request is None or self._request.Test()):
            if self.stage == self._gate:
                # MPI forbids two operations at once on one array, and a later one is to see what an earlier one wrote.
                if any(not earlier.finished for earlier in self._after):
                    return
                self._after = []  # else a chain of works would keep all its arrays alive
            self._request = next(self._steps, None)
            self.stage += 1
            self.finished = self._request is None

    def done(self) -> bool:
        """Local. Move all operations of the communicator forward; whether this one has finished."""
        if not self.finished:
            self._queue.progress()
        return self.finished

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        if not self.finished:
            self._queue.wait_for(self, timeout)


class MpiWorks(Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        """Local. Move all forward; whether all have finished."""
        return all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all of them, at most `timeout` seconds; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
