"""One operation at a time, in the order in which they were called, whatever threads call."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .work import PendingWork

_MOST_IDLE = 2


class Lane:
    """Where the operations of a group follow each other.

    What must be waited for anyway runs in the thread that calls, if nothing is under way; the rest in a thread of the
    lane's own, which starts with the first such operation. It runs the callbacks of an operation's future before the
    next operation, so that they come in order. A callback that starts an operation, or waits for one, leaves the lane
    to another thread first, for its own operation comes after those that have been called before.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._queue: deque[PendingWork] = deque()
        self._busy = False
        self._teller = 0  # the thread that has the lane, but only runs callbacks
        self._starting = 0  # threads
        self._idle = 0
        self._closed = False
        self._threads: set[threading.Thread] = set()

    def enter(self) -> bool:
        """Local. Take the lane if nothing is under way. Whoever has got it calls `leave`."""
        with self._condition:
            self._let_others()
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """Local. Let the next operation begin."""
        with self._condition:
            self._busy = False
            self._call()

    def give_way(self) -> None:
        """Local. If this thread runs a callback, let the next operation begin."""
        with self._condition:
            self._let_others()

    def post(self, work: PendingWork) -> None:
        """Local. Carry `work` out after all that has been called before."""
        with self._condition:
            self._queue.append(work)
            self._let_others()
            self._call()

    def close(self) -> None:
        """Local. End the threads when they have nothing left to do."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def join(self, seconds: float) -> None:
        """Local, after `close`. Wait for the ends of the threads, at most so long: at exit, Python kills the others."""
        deadline = time.monotonic() + seconds
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_others(self) -> None:
        if self._teller == threading.get_ident():
            self._teller, self._busy = 0, False
            self._call()

    def _call(self) -> None:
        """Have a thread look for the next operation, if there is one that can begin."""
        if self._busy or not self._queue:
            return
        if self._idle:
            self._condition.notify()
        elif not self._starting:
            self._starting += 1
            # A daemon: a script may end without destroy_process_group, in the middle of an operation.
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self) -> None:
        holds = False
        with self._condition:
            self._starting -= 1
        while (work := self._next(holds)) is not None:
            work.carry_out()
            holds = True
            if work.awaited:
                holds = self._tell(work)
            del work  # its tensors are the caller's again
        self._threads.discard(threading.current_thread())

    def _tell(self, work: PendingWork) -> bool:
        """Run the callbacks; whether this thread still has the lane."""
        self._teller = own = threading.get_ident()
        work.tell()
        with self._condition:
            held, self._teller = self._teller == own, 0 if self._teller == own else self._teller
            return held

    def _next(self, holds: bool) -> PendingWork | None:
        """Wait for the next operation, and take the lane, unless this thread has it."""
        with self._condition:
            if holds:
                self._busy = False
            if self._idle >= _MOST_IDLE:
                self._call()
                return None
            self._idle += 1
            try:
                while self._busy or not self._queue:
                    if self._closed and not self._queue:
                        return None
                    self._condition.wait()
            finally:
                self._idle -= 1
            self._busy = True
            return self._queue.popleft()
