"""Futures of operations, whose callbacks may call collectives.

The time when a callback runs depends on the rank: at once if its operation has ended, else later and in another thread.
So the collectives that callbacks call have no fixed place among the collectives that the script calls. They are put in
a `Channel` of their own, in the order of the callbacks, which run one after the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..private import untraced


class CallbackOwner(NamedTuple):
    """An operation whose callbacks call other operations.

    Attributes:
        channel: the name of the operation's channel, equal on all ranks.
        number: its place in that channel.
    """

    channel: str
    number: int


class _Running(threading.local):
    owner: CallbackOwner | None = None


_running = _Running()


def callback_owner() -> CallbackOwner | None:
    """Local. The operation whose callback runs in this thread; None outside of callbacks."""
    return _running.owner


@contextlib.contextmanager
def _runs_callbacks_of(whose: CallbackOwner) -> Iterator[None]:
    before, _running.owner = _running.owner, whose
    try:
        yield
    finally:
        _running.owner = before


@untraced
class CallbackFuture(torch.futures.Future[Any]):
    """A future whose callbacks know, by `callback_owner`, which operation they belong to.

    Args:
        whose: the operation.
        help_on: carries out the operation; called before a wait.
        first: the operation's own future, if this future is the result of `then`.
    """

    def __init__(
        self, whose: CallbackOwner, help_on: Callable[[], object], first: CallbackFuture | None = None
    ) -> None:
        super().__init__()
        self._whose = whose
        self._help_on = help_on
        self._first = first or self
        self._seen = False  # Python code may look at its error
        self._failed: list[tuple[CallbackFuture, BaseException]] = []

    def then(self, callback: Callable[[Any], Any]) -> CallbackFuture:
        """Local. Call `callback` with this future when it has ended; a future of its result."""
        self._seen = True
        child = CallbackFuture(self._whose, self._help_on, self._first)

        def run(_: object) -> None:
            try:
                value = callback(self)
            except BaseException as error:  # PyTorch would drop the error, and the child would never end
                self._first._failed.append((child, error))
                child._end(None, error)
            else:
                child._end(value, None)

        self.add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Local. Call `callback` with this future when it has ended."""

        def run(_: object) -> None:
            with _runs_callbacks_of(self._whose):
                callback(self)

        super().add_done_callback(run)

    def wait(self) -> Any:
        """Carry out the operation, and return its value or raise its error."""
        self._seen = True
        if not self.done():
            self._help_on()
        return super().wait()

    def complete(self, value: object, error: BaseException | None) -> None:
        """Local. Set the value or the error, and run the callbacks in this thread."""
        with _runs_callbacks_of(self._whose):  # PyTorch may have added callbacks in C++
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
        """Local. Raise the first error of a callback whose future no Python code has looked at."""
        for child, error in self._failed:
            if not child._seen:
                raise error
