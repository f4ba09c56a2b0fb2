"""Operations of a group, one at a time, in the order in which they were called, whatever threads call.

An operation is carried out by the thread that waits for it, after all that were called before it. Operations that start
in a backward pass are carried out by a callback at its end, in the thread that computes. The queue has a thread for the
rest: operations that no thread waits for, and operations that must progress while this process waits in another group.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DistoptError
from .dynamo import untraced
from .errors import as_torch
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
        in_backward: bool = False,
    ) -> None:
        super().__init__(tensors)
        self._queue = queue
        self._start = start
        self._action: Callable[[], object] | None = action
        self._seconds = seconds
        self._under_way: Work | None = None
        self._lock = threading.Lock()
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._told: torch.futures.Future[Any] | None = None
        self.in_backward = in_backward
        self.ended = False

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
                self._action()
        except DistoptError as error:
            self._error = as_torch(error)
            self._error.__cause__ = error
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._action = self._under_way = None  # and with it what they refer to
        with self._lock:
            self.ended = True
            self._told = self._futures and self._futures[0]

    def tell(self) -> None:
        """Run the callbacks of the future in this thread."""
        if self._told is not None:
            self._told.set_result(None)

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

        Its callbacks run in the thread that ends the operation, and may start and wait for other operations.
        """
        if of_a_hook(self._tensors):
            self.wait()
            return typed(self._tensors)
        with self._lock:
            if self._futures is not None:
                return self._futures[1]
            # Only a callback that raises gives a future an error that C++, where DDP waits, takes for one.
            first: torch.futures.Future[Any] = torch.futures.Future()
            self._futures = first, first.then(lambda _: self.result())
            ended = self.ended
        if ended:
            first.set_result(None)
        elif not (self.in_backward and _asked_by_ddp(sys._getframe(1))):
            self._queue.attend(at_once=True)
        return self._futures[1]


class OperationQueue:
    """The operations of a group that have been called and not carried out.

    Operations begin in the communicator as soon as all before them have begun, where they can. The callbacks of an
    operation's future run before the next operation ends, so that they come in order. A callback that starts an
    operation, or waits for one, first lets the next operation proceed.

    Args:
        name: of the thread.
        by_thread: the thread carries out every asynchronous operation: they move only while a thread waits, and
            should do so while this process computes.
    """

    def __init__(self, name: str, *, by_thread: bool) -> None:
        self._name = name
        self._by_thread = by_thread
        self._condition = threading.Condition()
        self._queue: deque[PendingWork] = deque()
        self._begun = 0  # at the front of the queue
        self._busy = False  # a thread is in the communicator, or runs callbacks
        self._teller = 0  # that thread, if it only runs callbacks
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
            self._give_way()
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def give_way(self) -> None:
        """Local. If this thread runs callbacks, let the next operation proceed."""
        if self._teller == threading.get_ident():  # which only this thread writes there
            with self._condition:
                self._give_way()

    def leave(self) -> None:
        """Local. Let the next operation proceed."""
        with self._condition:
            self._busy = False
            self._condition.notify_all()

    def post(self, work: PendingWork) -> None:
        """Local. Add an operation, which begins now if it can."""
        with self._condition:
            self._give_way()
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
                self._give_way()
                while self._busy and not work.ended:
                    self._condition.wait()
                if work.ended:
                    return
                self._busy = True
            self._carry_out_first()

    def complete_within(self, work: PendingWork, seconds: float) -> bool:
        """Local. Have the thread carry out what is left; whether `work` has ended within that time."""
        self.attend(at_once=True)
        with self._condition:
            self._give_way()
            return self._condition.wait_for(lambda: work.ended, seconds)

    def poll(self, work: PendingWork) -> bool:
        """Local. Move the operations forward; whether `work` has ended."""
        while not work.ended:
            with self._condition:
                self._give_way()
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
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
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
        """Local. End the thread when it has nothing left to do."""
        self._closed = True
        self._look.set()

    def join(self, seconds: float) -> None:
        """Local, after `close`. Wait for the end of the thread, at most so long: at exit, Python kills it."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(seconds)

    # -- within ------------------------------------------------------------------------------------------------------
    def _first(self) -> PendingWork | None:
        with self._condition:
            return self._queue[0] if self._queue else None

    def _begin(self) -> None:
        """Holding the communicator. Begin what can be begun, in order."""
        while self._begun < len(self._queue) and self._queue[self._begun].begin():
            self._begun += 1

    def _carry_out_first(self) -> None:
        """Holding the communicator. Carry out an operation, leave, and run its callbacks."""
        self._begin()
        work = self._queue[0]
        work.carry_out()
        with self._condition:
            self._queue.popleft()
            self._begun = max(self._begun - 1, 0)
            if not self._queue:
                _with_operations.discard(self)
            self._teller = threading.get_ident()
            self._condition.notify_all()
        work.tell()
        with self._condition:
            self._give_way()

    def _give_way(self) -> None:
        if self._teller == threading.get_ident():
            self._teller, self._busy = 0, False
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

    def __del__(self) -> None:
        if self.works:
            self._queue.attend(at_once=True)


def _asked_by_ddp(frame: FrameType | None) -> bool:
    """Whether a future was asked for by C++ in a backward pass, which waits for it only after its callbacks.

    A caller in Python may wait for it at once, in C++, where no thread carries the operation out: the innermost frame
    of Python is then that of a hook, and here the one in which torch.autograd runs its engine.
    """
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
