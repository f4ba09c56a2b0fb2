"""The queue of a channel: it carries out operations one at a time, in the order of the calls, from any thread.

The thread that waits for an operation carries it out, after all earlier ones. Operations called in a backward pass are
carried out by a callback at the end of the pass, in the computing thread. The queue's own thread does the rest:
operations that no thread waits for, and operations that must progress while this process waits in another group.

Callbacks of futures run one after the other, in the order of their operations, in a thread that has carried one out.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...errors import DistoptError
from ...recorder.timeline import timeline
from ..errors import as_torch
from ..private import BACKWARD, call_after_backward, called_by, current_backward_pass, untraced
from .arguments import seconds_of
from .futures import CallbackFuture, CallbackOwner
from .work import WaitedWork, of_a_hook, typed

if TYPE_CHECKING:
    from ...comm.work import Work
    from ...recorder.ring import GroupRecord

# The queue's thread carries out an operation only after this time: a thread that waits for it before does so itself,
# without a switch of threads.
_GRACE_SECONDS = 2e-3
_WIRES = 8  # lines of a timeline for operations that are under way together
_with_operations: set[OperationQueue] = set()  # the queues of this process that are not empty


@untraced
class PendingWork(WaitedWork):
    """An operation in the queue of its channel.

    Args:
        queue: carries it out.
        start: starts the operation before its turn, and returns the communicator's work; returns None or raises an
            error if that is not possible.
        action: carries out the whole operation in its turn, if it has not started.
        tensors: the tensors that the operation writes.
        seconds: how long a started operation waits for other ranks.
        number: its place in the channel, equal on all ranks.
        in_backward: it was called in a backward pass, and a callback at the end of the pass carries it out.
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
        self._began, self._operation = 0.0, 0  # when it started, and as which operation of the communicator
        self.in_backward = in_backward
        self.index = -1  # among the operations of its backward pass
        self.ended = False
        self.callbacks_ran = False  # the callbacks of its future have run

    # -- for the queue -----------------------------------------------------------------------------------------------
    def begin(self) -> bool:
        """Local. Start the operation if possible; whether it has started."""
        start, self._start = self._start, None
        if start is not None:
            if timeline.is_on:
                self._began = time.perf_counter()
            with contextlib.suppress(Exception):  # `action` meets the same error, and its waiter sees it
                self._under_way = start()
                if timeline.is_on and self._queue.flight is not None:
                    self._operation = self._queue.flight.last
        return self._under_way is not None

    def done(self) -> bool:
        """Local. Make progress; whether `carry_out` would return without waiting."""
        try:
            return self._under_way is not None and self._under_way.done()
        except DistoptError:
            return True

    def carry_out(self) -> None:
        """Wait for the started operation, or run the action. Keep an error for `wait`."""
        began = timeline.begin_wait() if timeline.is_on else 0.0
        try:
            if self._under_way is not None:
                self._under_way.wait(self._seconds)
            elif self._action is not None:
                with self._as_called():
                    self._action()
        except DistoptError as error:
            self._error = as_torch(error)
            self._error.__cause__ = error
        except BaseException as error:
            self._error = error
        self._action = self._under_way = None  # frees the tensors that they refer to
        if began:
            name = f"bucket {self.index}" if self.index >= 0 else f"operation {self._number % _WIRES}"
            flight, now = self._queue.flight, time.perf_counter()
            timeline.end_wait("wait", began, now, bucket=name)
            if self._began:
                ended = now if flight is None else flight.end_time(self._operation, now)
                timeline.add("wire", self._began, ended, name, bucket=name)

    def run_callbacks(self) -> None:
        """Run the callbacks of the future in this thread."""
        with self._lock:
            self.callbacks_ran = self._future is None
        if self._future is not None:
            self._future.complete(self._tensors, self._error)
            self.callbacks_ran = True

    def _complete(self) -> None:
        """Carry out the operation and run its callbacks, before a thread waits for the future."""
        self._queue.complete(self)
        self._queue.run_callbacks_up_to(self)

    @property
    def has_callbacks(self) -> bool:
        """Local. Whether its future has callbacks."""
        return self._future is not None and self._future.has_callbacks

    def raise_unseen(self) -> None:
        """Local. Raise the first error of a callback whose future no Python code has looked at."""
        if self._future is not None:
            self._future.raise_unseen()

    # -- for PyTorch -------------------------------------------------------------------------------------------------
    def is_completed(self) -> bool:
        """Local. Make progress; whether the operation has ended."""
        return self._queue.poll(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, at most `timeout` (default: the timeout of the operation).

        Raises:
            DistBackendError: the operation has failed, and the message names the rank at fault; or it has not ended in
                time, and continues.
        """
        seconds = seconds_of(timeout) if timeout is not None else 0.0
        if not self.ended and seconds <= 0:
            self._queue.complete(self)
        elif not self.ended and not self._queue.complete_within(self, seconds):
            raise dist.DistBackendError(f"the operation has not ended within {seconds:g} s; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future of the tensors, or of the error. Its callbacks may call collectives; see `futures`."""
        # C++ in a backward pass, that is DDP, asks from the frame that runs the pass, and waits at the end of the pass,
        # after the queue's callback. A hook in Python has a frame of its own, and may wait at once in C++, so the
        # queue's thread must carry out the operation.
        by_ddp = called_by(BACKWARD)
        if by_ddp and of_a_hook(self._tensors):
            self.wait()
            return typed(self._tensors)
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = CallbackFuture(CallbackOwner(self._queue.name, self._number), self._complete)
                if self.callbacks_ran:
                    future.complete(self._tensors, self._error)
        if not (self.callbacks_ran or (by_ddp and self.in_backward)):
            self._queue.attend(at_once=True)
        if by_ddp:
            # DDP waits in C++, where only the error of a callback counts.
            return torch.futures.Future.then(future, lambda _: self.result())
        return future


class OperationQueue:
    """The operations of a channel that have been called and not yet carried out.

    An operation that can start before its turn starts as soon as all earlier ones have.

    Args:
        name: of the channel.
        flight: notes the operations, if any does.
    """

    def __init__(self, name: str, flight: GroupRecord | None = None) -> None:
        self.name = name
        self.flight = flight
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._waiting = 0  # number of threads that wait for the condition
        self._queue: deque[PendingWork] = deque()
        self._begun = 0  # number of operations at the front of the queue that have started
        self._busy = 0  # the thread that uses the communicator
        self._ended: deque[PendingWork] = deque()  # operations that have ended, with callbacks to run
        self._callback_thread = 0  # the thread that runs callbacks
        self._at_the_end: Callable[[], _AtTheEnd | None] = lambda: None  # a weak reference: the last backward pass
        self._thread: threading.Thread | None = None
        self._look = threading.Event()
        self._at_once = False
        self._closed = False

    # -- operations --------------------------------------------------------------------------------------------------
    def enter(self) -> bool:
        """Local. Take the communicator, and return True, if the queue is empty. Call `leave` after the operation.

        Raises:
            DistBackendError: a signal handler calls this while an operation of its thread uses the communicator.
        """
        if _with_operations:
            self._let_others_go_on()
        with self._lock:  # the condition's own; entering the condition would take six times as long
            if self._busy or self._queue:
                self._refuse_interrupted()
                return False
            self._busy = threading.get_ident()
            return True

    def leave(self) -> None:
        """Local. Give the communicator back, after `enter` has returned True."""
        with self._lock:
            self._busy = 0
            if self._waiting:
                self._condition.notify_all()

    def post(self, work: PendingWork) -> None:
        """Local. Add an operation, and start it if possible."""
        with self._lock:
            self._queue.append(work)
            _with_operations.add(self)
            if self._busy:
                return
            self._busy = threading.get_ident()
        self._begin()
        self.leave()

    def complete(self, work: PendingWork) -> None:
        """Local. Carry out the operations up to `work`, or wait while another thread does.

        Raises:
            DistBackendError: a signal handler calls this while an operation of its thread uses the communicator.
        """
        while True:
            self._let_others_go_on()
            with self._lock:
                if self._busy and not work.ended:
                    self._refuse_interrupted()
                    self._wait(lambda: not self._busy or work.ended)
                if work.ended:
                    return
                self._busy = threading.get_ident()
            self._carry_out_first()

    def until_callbacks_ran(self, work: PendingWork) -> None:
        """Wait until the callbacks of `work`, which has ended, have run."""
        self._wait(lambda: work.callbacks_ran)

    def run_callbacks_up_to(self, work: PendingWork) -> None:
        """Local. If this thread waits for `work` in a callback, run all later callbacks up to those of `work`.

        Raises:
            RuntimeError: they are of the same operation, or of one whose callback waits for this one.
        """
        if self._callback_thread == threading.get_ident():  # no lock: no other thread writes this number
            while not work.callbacks_ran:
                if not self._ended:
                    raise RuntimeError(
                        "a callback waits for another callback that runs after it; return the future instead of "
                        "waiting for it, or wait where no callback runs"
                    )
                self._ended.popleft().run_callbacks()

    def drain(self, deadline: float) -> int:
        """Local. Have the queue's thread carry out all operations; how many are left at the deadline."""
        if self._queue or self._callback_thread:
            self.attend(at_once=True)
            is_idle = lambda: not (self._queue or self._ended or self._callback_thread)  # noqa: E731
            self._wait(is_idle, max(0.0, deadline - time.monotonic()))
        return len(self._queue)

    def complete_within(self, work: PendingWork, seconds: float) -> bool:
        """Local. Have the queue's thread carry out all operations; whether `work` ends within that time."""
        self.attend(at_once=True)
        return self._wait(lambda: work.ended, seconds)

    def poll(self, work: PendingWork) -> bool:
        """Local. Make progress with the operations; whether `work` has ended."""
        while not work.ended:
            with self._lock:
                if self._busy or work.ended:
                    break
                self._busy = threading.get_ident()
            self._begin()
            if not self._queue[0].done():
                self.leave()
                self.attend()
                break
            self._carry_out_first()
        return work.ended

    # -- who carries them out ----------------------------------------------------------------------------------------
    def attend(self, *, at_once: bool = False) -> None:
        """Local. Have the queue's thread carry out all operations, at once or after `_GRACE_SECONDS`."""
        self._at_once = self._at_once or at_once
        if self._thread in (None, threading.current_thread()):  # a callback that waits in that thread needs another one
            with self._lock:
                if self._thread in (None, threading.current_thread()) and not self._closed:
                    # A daemon, since a script may end in the middle of an operation.
                    self._thread = threading.Thread(target=self._serve, name=f"distopt {self.name}", daemon=True)
                    self._thread.start()
        if at_once or not self._look.is_set():
            self._look.set()

    def attend_after_backward(self, work: PendingWork) -> None:
        """Local, in a backward pass. Carry out `work`, and all before it, at the end of the pass in this thread.

        Autograd runs callbacks in the order in which they were queued. DDP queues its own after its last bucket, so
        this one runs first, and can raise the error that DDP would turn into a RuntimeError.
        """
        backward_pass, callback = current_backward_pass(), self._at_the_end()
        if callback is None or callback.backward_pass != backward_pass:
            callback = _AtTheEnd(self, backward_pass)
            self._at_the_end = weakref.ref(callback)
            call_after_backward(callback)
        work.index = len(callback.works)
        callback.works.append(work)

    def close(self) -> None:
        """Local. End the queue's thread after its current operation."""
        self._closed = True
        self._look.set()

    def join(self, deadline: float) -> None:
        """Local, after `close`. Wait until the queue's thread has ended, or until the deadline."""
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(max(0.0, deadline - time.monotonic()))

    # -- internal ------------------------------------------------------------------------------------------------------
    def _refuse_interrupted(self) -> None:
        """Local. Refuse to wait for an operation of this thread: a signal handler has interrupted it."""
        if self._busy == threading.get_ident():
            raise dist.DistBackendError(
                "a signal handler waits for a collective of the group whose collective it has interrupted, and that "
                "goes on only after the handler; set a variable in the handler, and call collectives between steps"
            )

    def _wait(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        """Local. Wait until `predicate` holds, at most `seconds` (None: no limit); return whether it holds."""
        with self._lock:
            self._waiting += 1
            try:
                return self._condition.wait_for(predicate, seconds)
            finally:
                self._waiting -= 1

    def _first(self) -> PendingWork | None:
        with self._lock:
            return self._queue[0] if self._queue else None

    def _begin(self) -> None:
        """Local, holding the communicator. Start operations in order, up to the first that cannot start."""
        while self._begun < len(self._queue) and self._queue[self._begun].begin():
            self._begun += 1

    def _carry_out_first(self) -> None:
        """Holding the communicator. Carry out the first operation, give the communicator back, and run callbacks."""
        self._begin()
        self._queue[0].carry_out()
        with self._lock:
            work = self._queue.popleft()
            work.ended = True
            self._ended.append(work)
            self._begun = max(self._begun - 1, 0)
            if not self._queue:
                _with_operations.discard(self)
            self._busy = 0
            self._condition.notify_all()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run the callbacks of operations that have ended, in order, unless another thread does."""
        while True:
            with self._lock:
                if self._callback_thread or not self._ended:
                    return
                self._callback_thread = threading.get_ident()
                work = self._ended.popleft()
            try:
                work.run_callbacks()
            finally:
                with self._lock:
                    self._callback_thread = 0
                    self._condition.notify_all()

    def _let_others_go_on(self) -> None:
        """Have other queues progress while this thread waits: ranks may wait for several groups in different orders."""
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
            if at_once:  # else another thread may set it now, and must not be overwritten
                self._at_once = False
            while (work := self._first()) is not None and (at_once or not work.in_backward):
                self.complete(work)
            del work  # frees its tensors while this thread sleeps


class _AtTheEnd:
    """The callback at the end of a backward pass. A pass that raises drops it, and the queue's thread does its work."""

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
                self._queue.until_callbacks_ran(work)
                work.raise_unseen()  # DDP would raise another error instead

    def __del__(self) -> None:
        if self.works:
            self._queue.attend(at_once=True)
