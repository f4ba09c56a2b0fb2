"""Collectives under way and ended, as PyTorch sees them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DistoptError
from .dynamo import untraced
from .errors import as_torch

if TYPE_CHECKING:
    from types import FrameType

    from ..comm.work import Work
    from .queue import OperationQueue


@untraced
class WaitedWork(dist.Work):
    """What can be waited for, of whatever kind: `wait` and `is_completed` are its own.

    Args:
        tensors: the result.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._error: BaseException | None = None

    def is_success(self) -> bool:
        """Local. Whether it has ended, and without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Local. Its error, if it has failed."""
        return self._error

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that have been written; waits."""
        self.wait()
        return self._tensors


@untraced
class DoneWork(WaitedWork):
    """An operation that had ended when it was returned."""

    def is_completed(self) -> bool:
        """Local. True."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future that holds the tensors."""
        if _of_a_hook(self._tensors):
            return _typed(self._tensors)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


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
        except BaseException as error:  # whoever waits gets it
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
        if _of_a_hook(self._tensors):
            self.wait()
            return _typed(self._tensors)
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


def _asked_by_ddp(frame: FrameType | None) -> bool:
    """Whether a future was asked for by C++ in a backward pass, which waits for it only after its callbacks.

    Whoever asks in Python may wait for it at once, in C++, where nobody carries the operation out: the innermost frame
    of Python is then that of a hook, and here the one in which torch.autograd runs its engine.
    """
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _of_a_hook(tensors: list[torch.Tensor]) -> bool:
    """Whether DDP's hook FP16_COMPRESS may want a future: of C++, it takes none whose value is a Python object."""
    return torch._C._current_graph_task_id() >= 0 and bool(tensors) and tensors[0].dtype == torch.float16


def _typed(tensors: list[torch.Tensor]) -> Any:
    """A future that holds a list of C++. Python can make only such that have ended."""
    return torch.jit.fork(lambda: tensors)
