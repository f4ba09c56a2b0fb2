"""Messages between two ranks of a group, independent of its collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ...errors import DistoptError
from ..errors import as_torch
from ..private import Received, untraced
from ..tensors import as_message, dense, give_back
from .arguments import seconds_of
from .futures import CallbackFuture, CallbackOwner
from .work import WaitedWork

if TYPE_CHECKING:
    from ...comm.base import Communicator
    from ...comm.work import MessageWork

_NAP_SECONDS = 1e-3  # between two polls of the unfinished messages


@untraced
class PendingMessage(Received, WaitedWork):
    """A message that has been started.

    Args:
        work: the communicator's work.
        row: the dense tensor whose memory is sent or received into.
        into: the tensor that the received message is copied to; None for a message that is sent.
        seconds: how long `wait` waits by default.
        mail: has the threads that wait on behalf of futures.
    """

    def __init__(
        self, work: MessageWork, row: torch.Tensor, into: torch.Tensor | None, seconds: float, mail: Mail
    ) -> None:
        super().__init__([] if into is None else [into])
        self._mail = mail
        self._work = work
        self._row = row
        self._into = into
        self._seconds = seconds
        self._lock = threading.Lock()
        self._future: CallbackFuture | None = None

    def is_completed(self) -> bool:
        """Local. Make progress with messages; whether this one has ended."""
        return self._ends(self._work.done)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, at most `timeout` (default: the timeout of the group).

        Raises:
            DistBackendError: the other rank has ended, was late, or sent another count or type.
        """
        seconds = seconds_of(timeout) if timeout is not None else 0.0
        self._wait(seconds if seconds > 0 else self._seconds)
        if self._error is not None:
            raise self._error
        return True

    def source_rank(self) -> int:
        """Local, after the end. The rank in the group that has sent the message."""
        return self._work.source

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Local. A future of the tensor, or of the error; a thread waits for the message and completes it."""
        with self._lock:
            if self._future is None:
                self._future = CallbackFuture(CallbackOwner("messages", 0), lambda: None)
                self._mail.run(self._complete)
        return self._future

    def _complete(self) -> None:
        self._wait(self._seconds)
        self._future.complete(self._tensors, self._error)  # type: ignore[union-attr] # made before

    def _wait(self, seconds: float) -> None:
        """Wait for the end, at most `seconds`; an error is kept."""
        self._ends(lambda: self._work.wait(seconds))

    def _ends(self, step: Any) -> bool:
        """Whether the message has ended after `step`, which returns False if not. Copies a received message."""
        try:
            if self._error is None and step() is False:
                return False
        except DistoptError as error:
            self._error = as_torch(error)
        with self._lock:
            into, self._into = self._into, None
            if into is not None and self._error is None:
                with self._as_called():
                    give_back(self._row, into)
        return True


class Mail:
    """Sends and receives tensors over a communicator.

    Messages progress while this rank waits for one of them or for a collective of the group. A thread polls the
    unfinished ones, in case this rank does not wait.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._condition = threading.Condition()
        self._under_way: list[MessageWork] = []
        self._sent: list[PendingMessage] = []
        self._thread: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def send(self, tensor: torch.Tensor, to: int, tag: int, seconds: float) -> PendingMessage:
        """Local. Send the values of `tensor` to rank `to` of the group."""
        row = dense(tensor)
        array, wire = as_message(row)
        work = self._communicator.send(array, to, tag=tag, wire=wire)
        message = self._started(PendingMessage(work, row, None, seconds, self))
        self._sent = [one for one in self._sent if not one.is_completed()]
        self._sent.append(message)
        return message

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, seconds: float) -> PendingMessage:
        """Local. Receive into `tensor` from rank `source` of the group; None: from any rank."""
        row = dense(tensor)
        array, wire = as_message(row)
        work = self._communicator.receive(array, source, tag=tag, wire=wire)
        return self._started(PendingMessage(work, row, tensor, seconds, self))

    def run(self, target: Callable[[], None]) -> None:
        """Local. Run `target` in a thread, which `join` waits for."""

        def run() -> None:
            target()
            self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="distopt message", daemon=True)
        self._threads.add(thread)
        thread.start()

    def drain(self, deadline: float) -> int:
        """Local. Wait for the messages that this rank has sent; how many have not ended at the deadline."""
        for message in self._sent:
            message._wait(max(1e-3, deadline - time.monotonic()))
        return sum(not message.is_completed() for message in self._sent)

    def join(self, deadline: float) -> None:
        """Local, after the communicator has been closed. Wait until the threads have ended, or until the deadline."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        for thread in (self._thread, *tuple(self._threads)):
            if thread not in (None, threading.current_thread()):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _started(self, message: PendingMessage) -> PendingMessage:
        if not self._communicator.moves_messages and not message.is_completed():
            with self._condition:
                self._under_way.append(message._work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._move, name="distopt messages", daemon=True)
                    self._thread.start()
                self._condition.notify()
        return message

    def _move(self) -> None:
        while True:
            with self._condition:
                while not self._under_way:
                    if self._closed:
                        return
                    self._condition.wait()
                works = list(self._under_way)
            time.sleep(_NAP_SECONDS)
            try:
                left = [work for work in works if not work.done()]
            except DistoptError:  # `wait` raises it, too
                left = []
            with self._condition:
                self._under_way = left + self._under_way[len(works) :] if not self._closed else []
