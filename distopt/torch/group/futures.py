"""Futures of operations, and the place of what their callbacks call.

When a callback runs depends on the rank: at once where its operation has ended, else later and in another thread. So a
collective that a callback calls has no place among those that the script calls. It has one in a `Lane`: its place among
what the callbacks of the same operations call, which run one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..private import untraced


class Origin(NamedTuple):
    """An operation whose callbacks call others.

    Attributes:
        lane: the name of its lane, equal on all ranks.
        number: its place there.
    """

    lane: str
    number: int


class _Running(threading.local):
    origin: Origin | None = None


_running = _Running()


def origin() -> Origin | None:
    """Local. The operation whose callback this thread runs, if it runs one."""
    return _running.origin


@contextlib.contextmanager
def _runs_callbacks_of(whose: Origin) -> Iterator[None]:
    before, _running.origin = _running.origin, whose
    try:
        yield
    finally:
        _running.origin = before


@untraced
class CallbackFuture(torch.futures.Future[Any]):
    """A future that marks the thread in which its callbacks run.

    Args:
        whose: the operation whose end it stands for.
        help_on: called before a wait, to carry that out.
        first: the future of the operation, if this one is of a callback.
    """

    def __init__(self, whose: Origin, help_on: Callable[[], object], first: CallbackFuture | None = None) -> None:
        super().__init__()
        self._whose = whose
        self._help_on = help_on
        self._first = first or self
        self._seen = False  # somebody looks at its error
        self._failed: list[tuple[CallbackFuture, BaseException]] = []

    def then(self, callback: Callable[[Any], Any]) -> CallbackFuture:
        """Local. See `torch.futures.Future.then`."""
        self._seen = True
        child = CallbackFuture(self._whose, self._help_on, self._first)

        def run(_: object) -> None:
            try:
                value = callback(self)
            except BaseException as error:  # PyTorch would drop it, and leave the child without an end
                self._first._failed.append((child, error))
                child._end(None, error)
            else:
                child._end(value, None)

        self.add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Local. See `torch.futures.Future.add_done_callback`."""

        def run(_: object) -> None:
            with _runs_callbacks_of(self._whose):
                callback(self)

        super().add_done_callback(run)

    def wait(self) -> Any:
        """See `torch.futures.Future.wait`."""
        self._seen = True
        self._help_on()
        return super().wait()

    def complete(self, value: object, error: BaseException | None) -> None:
        """Local. Give it its value, or its error, and run its callbacks in this thread."""
        with _runs_callbacks_of(self._whose):  # also those of futures that PyTorch has made of it
            self._end(value, error)

    def _end(self, value: object, error: BaseException | None) -> None:
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    @property
    def has_callbacks(self) -> bool:
        """Local. Whether `then` has been called."""
        return self._seen

    def raise_unseen(self) -> None:
        """Local. Raise the first error of a callback of which nobody in Python hears."""
        for child, error in self._failed:
            if not child._seen:
                raise error
