"""One operation at a time, in the order in which they were called, whatever threads call."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .work import PendingWork

__all__ = ["Lane"]

_MOST_IDLE = 2


class Lane:
    """Where the operations of a group follow each other.

    What must be waited for anyway runs in the thread that calls, if nothing is under way; the rest in threads of the
    lane's own. There is one of these, from the first such operation on, and one more for each callback of a future
    that blocks: a callback may wait for an operation that comes later.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[PendingWork] = deque()
        self._busy = False
        self._idle = 0
        self._closed = False

    def enter(self) -> bool:
        """Local. Take the lane if nothing is under way. Whoever has got it calls `leave`."""
        with self._condition:
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """Local. Let the next operation begin."""
        with self._condition:
            self._busy = False
            if self._queue:
                self._call()

    def post(self, work: PendingWork) -> None:
        """Local. Carry `work` out after all that has been called before."""
        with self._condition:
            self._queue.append(work)
            if not self._busy:
                self._call()

    def close(self) -> None:
        """Local. End the threads when they have nothing left to do."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _call(self) -> None:
        if self._idle:
            self._condition.notify()
        else:
            # A daemon: a script may end without destroy_process_group, in the middle of an operation.
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        holds = False
        while (work := self._next(holds)) is not None:
            work.carry_out()
            holds = not work.awaited
            if not holds:
                self.leave()
                work.tell()
            del work  # its tensors are the caller's again

    def _next(self, holds: bool) -> PendingWork | None:
        """Wait for the next operation, and take the lane, unless this thread has it."""
        with self._condition:
            if holds:
                self._busy = False
            if self._idle >= _MOST_IDLE:
                return None
            self._idle += 1
            try:
                while self._busy or not self._queue:
                    if self._closed:
                        return None
                    self._condition.wait()
            finally:
                self._idle -= 1
            self._busy = True
            return self._queue.popleft()
