"""Lanes: operations of a group in one order, over a communicator of their own.

What the script calls is in the first lane. Operations that callbacks call are in others: one for each lane whose
operations have these callbacks, so that the order in a lane is the same on all ranks whenever callbacks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..ddp.shared_buckets import SharedBuckets
from ..hosts.communicator import HostsCommunicator
from .collectives import Collectives
from .futures import origin
from .queue import OperationQueue, PendingWork

if TYPE_CHECKING:
    from ...comm.base import Communicator

_MOST_LEVELS = 8  # of callbacks of operations of callbacks; each has a communicator


class Lane:
    """Operations in one order.

    Args:
        name: equal on all ranks.
        communicator: moves the bytes.
        who: what messages call the ranks.
        seconds: for which operations wait for a rank.

    Attributes:
        count: operations that have been called.
        lock: of the order of calls.
    """

    def __init__(self, name: str, communicator: Communicator, who: Sequence[str], seconds: float) -> None:
        self.name = name
        self.communicator = communicator
        self.who = who
        self.seconds = seconds
        self.collectives = Collectives(communicator, who)
        by_thread = isinstance(communicator, HostsCommunicator) and not communicator.begins_at_once
        self.queue = OperationQueue(name, by_thread=by_thread)
        self.shared_buckets = (
            SharedBuckets(communicator, self._post, seconds) if communicator.reduces_in_place else None
        )
        self.count = 0
        self.lock = threading.RLock()

    def _post(self, action: Callable[[], object]) -> PendingWork:
        work = PendingWork(self.queue, None, action, [], self.seconds)
        self.queue.post(work)
        return work


class Lanes:
    """The lanes of a group.

    Args:
        first: of what the script calls.
        connect: makes a communicator of the group's ranks; collective among them, with equal names.
    """

    def __init__(self, first: Lane, connect: Callable[[str], Communicator]) -> None:
        self.first = first
        self._connect = connect
        self._others: dict[str, Lane] = {}

    def of_caller(self) -> tuple[Lane, Collectives]:
        """Local, but collective at the first call in a callback. The lane of what this thread calls now."""
        whose = origin()
        if whose is None:
            return self.first, self.first.collectives
        lane = self._others.get(whose.lane)
        if lane is None:
            lane = self._others[whose.lane] = self._new(whose.lane)
        # Callbacks that run in another order on another rank call other operations, which ranks find by their labels.
        return lane, lane.collectives.noted(f"callback of #{whose.number}")

    def all(self) -> list[Lane]:
        """Local. All lanes."""
        return [self.first, *self._others.values()]

    def _new(self, source: str) -> Lane:
        name = f"{self.first.name} in {source}"
        if name.count(" in ") > _MOST_LEVELS:
            raise UsageError(
                f"a callback of an operation that a callback has called, {_MOST_LEVELS} times over, calls another "
                "operation; wait for each in the callback that has called it"
            )
        return Lane(name, self._connect(name), self.first.who, self.first.seconds)
