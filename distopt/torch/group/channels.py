"""Channels: each has operations of a group in one order, and a communicator of its own.

The first channel has the operations that the script calls. The operations that callbacks call are in other channels:
callbacks of operations of one channel share the next channel. So the order in every channel is the same on all ranks,
whenever callbacks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..ddp.shared_buckets import SharedBuckets
from .collectives import Collectives
from .futures import callback_owner
from .queue import OperationQueue, PendingWork

if TYPE_CHECKING:
    from ...comm.base import Communicator

_MOST_LEVELS = 8  # callbacks of operations that callbacks have called, and so on; each level has a communicator


class Channel:
    """A sequence of operations, the same on all ranks.

    Args:
        name: equal on all ranks.
        communicator: moves the bytes.
        who: how error messages name the ranks.
        seconds: how long operations wait for a rank.

    Attributes:
        count: number of operations called so far.
        lock: held while an operation gets its place in the sequence.
    """

    def __init__(self, name: str, communicator: Communicator, who: Sequence[str], seconds: float) -> None:
        self.name = name
        self.communicator = communicator
        self.who = who
        self.seconds = seconds
        self.collectives = Collectives(communicator, who)
        self.queue = OperationQueue(name, communicator.flight)
        self.shared_buckets = (
            SharedBuckets(communicator, self._post, seconds) if communicator.reduces_in_place else None
        )
        self.count = 0
        self.lock = threading.RLock()

    def _post(self, action: Callable[[], object]) -> PendingWork:
        work = PendingWork(self.queue, None, action, [], self.seconds)
        self.queue.post(work)
        return work


class Channels:
    """The channels of a group.

    Args:
        first: the channel of the operations that the script calls.
        connect: makes a communicator of the group's ranks; collective, with the same name on all ranks.
    """

    def __init__(self, first: Channel, connect: Callable[[str], Communicator]) -> None:
        self.first = first
        self._connect = connect
        self._others: dict[str, Channel] = {}

    def of_caller(self) -> tuple[Channel, Collectives]:
        """Local, but collective at the first call in a callback. The channel of the operations of this thread."""
        whose = callback_owner()
        if whose is None:
            return self.first, self.first.collectives
        channel = self._others.get(whose.channel)
        if channel is None:
            channel = self._others[whose.channel] = self._new(whose.channel)
        # If callbacks run in different orders on different ranks, these labels differ, and the ranks raise an error.
        return channel, channel.collectives.noted(f"callback of #{whose.number}")

    def all(self) -> list[Channel]:
        """Local. All channels, the first one first."""
        return [self.first, *self._others.values()]

    def _new(self, source: str) -> Channel:
        name = f"{self.first.name} in {source}"
        if name.count(" in ") > _MOST_LEVELS:
            raise UsageError(
                f"a callback of an operation that a callback has called, {_MOST_LEVELS} times over, calls another "
                "operation; wait for each in the callback that has called it"
            )
        return Channel(name, self._connect(name), self.first.who, self.first.seconds)
