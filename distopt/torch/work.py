"""Collectives under way and ended, as PyTorch sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .dynamo import untraced


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
    """An operation that another thread carries out.

    Args:
        action: carries it out; raises `DistBackendError` or a `ValueError`.
        tensors: the result.
        give_way: called before this thread waits; see `Lane.give_way`.
    """

    def __init__(self, action: Callable[[], object], tensors: list[torch.Tensor], give_way: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._action: Callable[[], object] | None = action
        self._give_way = give_way
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._told: torch.futures.Future[Any] | None = None

    # -- for the thread that carries it out --------------------------------------------------------------------------
    def carry_out(self) -> None:
        """Run the action, and wake those who wait."""
        try:
            if self._action:
                self._action()
        except BaseException as error:  # whoever waits gets it
            self._error = error
        self._action = None  # and with it what it refers to
        with self._lock:
            self._ended.set()
            self._told = self._futures and self._futures[0]

    @property
    def awaited(self) -> bool:
        """Local, once it has ended. Whether `tell` has a future to tell, whose callbacks may take long."""
        return self._told is not None

    def tell(self) -> None:
        """Run the callbacks of the future in this thread."""
        if self._told is not None:
            self._told.set_result(None)

    # -- for PyTorch -------------------------------------------------------------------------------------------------
    def is_completed(self) -> bool:
        """Local. Whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, at most `timeout` (default: the operation's own).

        Raises:
            DistBackendError: it has failed; the message names the rank at fault, or it has not ended in time.
        """
        if not self._ended.is_set():
            self._give_way()
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._ended.wait(seconds if seconds > 0 else None):
            raise dist.DistBackendError(f"the operation has not ended within {seconds:g} s; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future that gets the tensors, or the error, when the operation ends.

        Its callbacks run in a thread of the group's, and may start and wait for other operations.
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
            ended = self._ended.is_set()
        if ended:
            first.set_result(None)
        return self._futures[1]


def _of_a_hook(tensors: list[torch.Tensor]) -> bool:
    """Whether DDP's hook FP16_COMPRESS may want a future: of C++, it takes none whose value is a Python object."""
    return torch._C._current_graph_task_id() >= 0 and bool(tensors) and tensors[0].dtype == torch.float16


def _typed(tensors: list[torch.Tensor]) -> Any:
    """A future that holds a list of C++. Python can make only such that have ended."""
    return torch.jit.fork(lambda: tensors)
