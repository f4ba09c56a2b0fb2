"""Operations of a lane, one at a time, in the order in which they were called, whatever threads call.

An operation is carried out by the thread that waits for it, after all that were called before it. Operations that start
in a backward pass are carried out by a callback at its end, in the thread that computes. The queue has a thread for the
rest: operations that no thread waits for, and operations that must progress while this process waits in another group.

The callbacks of futures run one after the other, in the order of their operations, in a thread that has ended one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import DistoptError
from .dynamo import untraced
from .errors import as_torch
from .futures import CallbackFuture, Origin
from .work import WaitedWork, of_a_hook, typed

if TYPE_CHECKING:
    from types import FrameType

    from ..comm.work import Work

# For which an operation is left to those who may wait for it, before the thread carries it out.
_GRACE_SECONDS = 2e-3
_with_operations: set[OperationQueue] = set()  # of this process


@untraced
class PendingWork(WaitedWork):
    """An operation in the queue of its group.

    Args:
        queue: carries it out.
        start: starts it in the communicator; None, or an error, if that cannot be done before its turn.
        action: carries it out as a whole.
        tensors: the result.
        seconds: for which what has started waits for other ranks.
        number: its place in the lane, equal on all ranks.
        in_backward: it was called in a backward pass, whose callback carries it out.
    """

    def __init__(
        self,
        queue: OperationQueue,
        start: Callable[[], Work | None] | None,
        action: Callable[[], object],
        tensors: list[torch.Tensor],
        seconds: float,
        *,
        number: int = 0,
        in_backward: bool = False,
    ) -> None:
        super().__init__(tensors)
        self._queue = queue
        self._start = start
        self._action: Callable[[], object] | None = action
        self._seconds = seconds
        self._under_way: Work | None = None
        self._lock = threading.Lock()
        self._future: CallbackFuture | None = None
        self._number = number
        self.in_backward = in_backward
        self.ended = False
        self.told = False  # the callbacks of its future have run

    # -- for the queue -----------------------------------------------------------------------------------------------
    def begin(self) -> bool:
        """Local. Start it; whether it has started."""
        start, self._start = self._start, None
        if start is not None:
            with contextlib.suppress(Exception):  # `action` meets the same, and raises it where it can be seen
                self._under_way = start()
        return self._under_way is not None

    def done(self) -> bool:
        """Local. Move it forward; whether to carry it out takes no waiting."""
        try:
            return self._under_way is not None and self._under_way.done()
        except DistoptError:
            return True

    def carry_out(self) -> None:
        """Wait for what has started, or run the action."""
        try:
            if self._under_way is not None:
                self._under_way.wait(self._seconds)
            elif self._action is not None:
                with self._as_called():
                    self._action()
        except DistoptError as error:
            self._error = as_torch(error)
            self._error.__cause__ = error
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._action = self._under_way = None  # and with it what they refer to

    def tell(self) -> None:
        """Run the callbacks of the future in this thread."""
        with self._lock:
            self.told = self._future is None
        if self._future is not None:
            self._future.complete(self._tensors, self._error)
            self.told = True

    def _complete(self) -> None:
        """Before a wait for the future."""
        self._queue.complete(self)
        self._queue.tell_within_callback(self)

    @property
    def has_callbacks(self) -> bool:
        """Local. Whether its future has callbacks."""
        return self._future is not None and self._future.has_callbacks

    def raise_unseen(self) -> None:
        """Local. Raise the error of a callback, unless somebody has asked for it."""
        if self._future is not None:
            self._future.raise_unseen()

    # -- for PyTorch -------------------------------------------------------------------------------------------------
    def is_completed(self) -> bool:
        """Local. Whether it has ended; moves it forward."""
        return self._queue.poll(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, at most `timeout` (default: the operation's own).

        Raises:
            DistBackendError: it has failed; the message names the rank at fault, or it has not ended in time.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self.ended and seconds <= 0:
            self._queue.complete(self)
        elif not self.ended and not self._queue.complete_within(self, seconds):
            raise dist.DistBackendError(f"the operation has not ended within {seconds:g} s; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future that gets the tensors, or the error, when the operation ends.

        Its callbacks may call collectives and wait for them; see `futures`.
        """
        by_ddp = _asked_by_ddp(sys._getframe(1))
        if by_ddp and of_a_hook(self._tensors):
            self.wait()
            return typed(self._tensors)
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = CallbackFuture(Origin(self._queue.name, self._number), self._complete)
                if self.told:
                    future.complete(self._tensors, self._error)
        if not (self.told or (by_ddp and self.in_backward)):
            self._queue.attend(at_once=True)
        if by_ddp:
            # Only a callback that raises gives a future an error that C++, where DDP waits, takes for one.
            return torch.futures.Future.then(future, lambda _: self.result())
        return future


class OperationQueue:
    """The operations of a lane that have been called and not carried out.

    Operations begin in the communicator as soon as all before them have begun, where they can.

    Args:
        name: of the lane.
        by_thread: the thread carries out every asynchronous operation: they move only while a thread waits, and
            should do so while this process computes.
    """

    def __init__(self, name: str, *, by_thread: bool) -> None:
        self.name = name
        self._by_thread = by_thread
        self._condition = threading.Condition()
        self._queue: deque[PendingWork] = deque()
        self._begun = 0  # at the front of the queue
        self._busy = False  # a thread is in the communicator
        self._untold: deque[PendingWork] = deque()  # ended, with callbacks to run
        self._teller = 0  # the thread that runs them
        self._at_the_end: Callable[[], _AtTheEnd | None] = lambda: None  # of the last backward pass
        self._thread: threading.Thread | None = None
        self._look = threading.Event()
        self._at_once = False
        self._closed = False

    # -- operations --------------------------------------------------------------------------------------------------
    def enter(self) -> bool:
        """Local. Take the communicator if nothing is under way. Whoever has got it calls `leave`."""
        self._let_others_go_on()
        with self._condition:
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """Local. Let the next operation proceed."""
        with self._condition:
            self._busy = False
            self._condition.notify_all()

    def post(self, work: PendingWork) -> None:
        """Local. Add an operation, which begins now if it can."""
        with self._condition:
            self._queue.append(work)
            _with_operations.add(self)
            if self._busy:
                return
            self._busy = True
        self._begin()
        self.leave()

    def complete(self, work: PendingWork) -> None:
        """Local. Carry out the operations up to `work`, unless another thread does."""
        while True:
            self._let_others_go_on()
            with self._condition:
                while self._busy and not work.ended:
                    self._condition.wait()
                if work.ended:
                    return
                self._busy = True
            self._carry_out_first()

    def until_told(self, work: PendingWork) -> None:
        """Wait until the callbacks of an operation that has ended have run."""
        with self._condition:
            self._condition.wait_for(lambda: work.told)

    def tell_within_callback(self, work: PendingWork) -> None:
        """Local. If this thread runs a callback that waits for those of `work`, run them, and all before them.

        Raises:
            RuntimeError: the callback is of `work` itself, or of one whose callbacks wait for this one.
        """
        if self._teller == threading.get_ident():  # no other thread writes this number
            while not work.told:
                if not self._untold:
                    raise RuntimeError(
                        "a callback waits for another callback that runs after it; return the future instead of "
                        "waiting for it, or wait where no callback runs"
                    )
                self._untold.popleft().tell()

    def drain(self, deadline: float) -> int:
        """Local. Have the thread carry out what is left; how many operations are left at the deadline."""
        if self._queue or self._teller:
            self.attend(at_once=True)
            with self._condition:
                is_idle = lambda: not (self._queue or self._untold or self._teller)  # noqa: E731
                self._condition.wait_for(is_idle, max(0.0, deadline - time.monotonic()))
        return len(self._queue)

    def complete_within(self, work: PendingWork, seconds: float) -> bool:
        """Local. Have the thread carry out what is left; whether `work` has ended within that time."""
        self.attend(at_once=True)
        with self._condition:
            return self._condition.wait_for(lambda: work.ended, seconds)

    def poll(self, work: PendingWork) -> bool:
        """Local. Move the operations forward; whether `work` has ended."""
        while not work.ended:
            with self._condition:
                if self._busy or work.ended:
                    break
                self._busy = True
            self._begin()
            if not self._queue[0].done():
                self.leave()
                self.attend()
                break
            self._carry_out_first()
        return work.ended

    # -- who carries them out ----------------------------------------------------------------------------------------
    def attend(self, *, at_once: bool = False) -> None:
        """Local. Have the thread carry out what no other thread has waited for within a moment, or `at_once`."""
        at_once = at_once or self._by_thread
        self._at_once = self._at_once or at_once
        if self._thread in (None, threading.current_thread()):  # which runs a callback that may wait
            with self._condition:
                if self._thread in (None, threading.current_thread()) and not self._closed:
                    # A daemon: a script may end without destroy_process_group, in the middle of an operation.
                    self._thread = threading.Thread(target=self._serve, name=f"distopt {self.name}", daemon=True)
                    self._thread.start()
        if at_once or not self._look.is_set():
            self._look.set()

    def attend_after_backward(self, work: PendingWork) -> None:
        """Local, in a backward pass. Carry out `work` at its end, in this thread, with what has been posted before.

        Callbacks run in the order of their queueing, so this comes before that of DDP, which is queued after its last
        bucket, and which would make a RuntimeError of its future's error.
        """
        if self._by_thread:
            self.attend()
        backward_pass, callback = torch._C._current_graph_task_id(), self._at_the_end()
        if callback is None or callback.backward_pass != backward_pass:
            callback = _AtTheEnd(self, backward_pass)
            self._at_the_end = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        callback.works.append(work)

    def close(self) -> None:
        """Local. End the thread after the operation that it is in."""
        self._closed = True
        self._look.set()

    def join(self, deadline: float) -> None:
        """Local, after `close`. Wait for the end of the thread, until the deadline."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(max(0.0, deadline - time.monotonic()))

    # -- within ------------------------------------------------------------------------------------------------------
    def _first(self) -> PendingWork | None:
        with self._condition:
            return self._queue[0] if self._queue else None

    def _begin(self) -> None:
        """Holding the communicator. Begin what can be begun, in order."""
        while self._begun < len(self._queue) and self._queue[self._begun].begin():
            self._begun += 1

    def _carry_out_first(self) -> None:
        """Holding the communicator. Carry out an operation, leave, and run callbacks, unless another thread does."""
        self._begin()
        self._queue[0].carry_out()
        with self._condition:
            work = self._queue.popleft()
            work.ended = True
            self._untold.append(work)
            self._begun = max(self._begun - 1, 0)
            if not self._queue:
                _with_operations.discard(self)
            self._busy = False
            self._condition.notify_all()
        self._tell()

    def _tell(self) -> None:
        """Run the callbacks of what has ended, in order, unless another thread does."""
        while True:
            with self._condition:
                if self._teller or not self._untold:
                    return
                self._teller = threading.get_ident()
                work = self._untold.popleft()
            try:
                work.tell()
            finally:
                with self._condition:
                    self._teller = 0
                    self._condition.notify_all()

    def _let_others_go_on(self) -> None:
        """Before this thread waits. Ranks may wait for the operations of several groups in different orders."""
        if len(_with_operations) > (self in _with_operations):
            for queue in tuple(_with_operations):
                if queue is not self:
                    queue.attend(at_once=True)

    def _serve(self) -> None:
        while self._thread is threading.current_thread() and not self._closed:
            self._look.wait()
            self._look.clear()
            if not self._at_once:
                time.sleep(_GRACE_SECONDS)
            at_once = self._at_once
            if at_once:  # else another thread may be setting it
                self._at_once = False
            while (work := self._first()) is not None and (at_once or not work.in_backward):
                self.complete(work)
            del work  # its tensors are the caller's again


class _AtTheEnd:
    """The callback of a backward pass. A pass that raises half-way drops it: the thread then takes its place."""

    def __init__(self, queue: OperationQueue, backward_pass: int) -> None:
        self._queue = queue
        self.backward_pass = backward_pass
        self.works: list[PendingWork] = []

    def __call__(self) -> None:
        works, self.works = self.works, []
        for work in works:
            self._queue.complete(work)
        for work in works:
            work.wait()
        for work in works:
            if work.has_callbacks:
                self._queue.until_told(work)
                work.raise_unseen()  # DDP would make another error of it

    def __del__(self) -> None:
        if self.works:
            self._queue.attend(at_once=True)


def _asked_by_ddp(frame: FrameType | None) -> bool:
    """Whether a future was asked for by C++ in a backward pass, which waits for it only after its callbacks.

    A caller in Python may wait for it at once, in C++, where no thread carries the operation out: the innermost frame
    of Python is then that of a hook, and here the one in which torch.autograd runs its engine.
    """
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
