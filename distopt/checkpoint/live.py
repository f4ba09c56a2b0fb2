"""Survivors of a fault give their live states: the shared arrays as they are after the last step.

A collective that fails leaves parameters and the optimizer as the last step has left them. From an optimizer's update
to the end of the step they are closed: a thread that waits for the agent's request waits for that end, and while it
writes, the next update waits. The ranks of an agent write one file together: each writes the arrays that the others
have not written, so that it becomes whole though some of them end meanwhile. Ranks at another step write another file.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import StateError
from ..files import arrays_in, head_of
from ..launch.end_together.report import supervisor
from ..launch.heal.state_slots import content_of, seconds_to_give
from .adapters import on_host
from .folder import MARK, SHARED, WRITER
from .state_files import Held, Label, States, copies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..files import Arrays
    from .adapters import Adapter

_LOCK_SECONDS = 0.2  # then another rank is stopped while it prepares the file
_WRITTEN = "written"  # an array in the file: for each of the others, by name, whether it has been written
_REST_SECONDS = 10.0  # that a rank waits, once it has given its states, to be ended


class Gifts:
    """The files of an agent for live states.

    Args:
        fds: their descriptors.
    """

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self.source = -1  # the file from which the ranks have resumed

    def held(self, rank: int) -> list[Held]:
        """A description of the states in whole files, by this rank."""
        return [states.held._replace(writer=(rank, 1)) for states in map(_whole, self._fds) if states is not None]

    def read(self, label: Label) -> tuple[Arrays, dict[str, Any]] | None:
        """Shared arrays, and notes of their objects, of this label; None if no whole file has them."""
        for i, fd in enumerate(self._fds):
            states = _whole(fd)
            if states is not None and states.held.label == label:
                self.source = i
                return copies(states.arrays), states.notes
        return None

    def forget(self, label: Label) -> None:
        """Give back the memory of older states: copies have taken their place."""
        for fd in self._fds:
            states = _whole(fd)
            if states is not None and states.held.label < label:
                os.ftruncate(fd, 0)

    def write(self, label: Label, arrays: Mapping[str, Any], notes: Mapping[str, Any], place: int) -> None:
        """Write the arrays that other ranks of the agent do not write."""
        files = [fd for i, fd in enumerate(self._fds) if i != self.source]
        fd = files[label.step % 2]
        names = sorted(arrays)
        states = States(
            Held(label, (0, 1), {}, "gift"), {key: arrays[key] for key in names}, dict(sorted(notes.items()))
        )
        in_file, stamp = states.in_file()
        in_file[_WRITTEN] = np.zeros(len(names), np.uint8)
        head, _ = head_of(in_file, MARK, stamp)
        with _locked(fd):
            if os.pread(fd, len(head), 0) != head:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, len(head) + sum(array.nbytes for array in in_file.values()))
                os.pwrite(fd, head, 0)
        views, _ = arrays_in(content_of(fd), MARK, WRITER)
        written = views[_WRITTEN]
        for i in [*range(place, len(names)), *range(min(place, len(names)))]:
            if not written[i]:
                views[SHARED + names[i]][...] = on_host(arrays[names[i]])
                written[i] = 1


def _whole(fd: int) -> States | None:
    """The states in a file, with views of the arrays; None if it is not whole."""
    content = content_of(fd)
    with suppress(StateError):
        if arrays_in(content, MARK, WRITER)[0][_WRITTEN].all():
            return States.read(content)
    return None


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Hold the lock of a file among processes.

    Raises:
        BlockingIOError: another holds it for too long.
    """
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.001)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


class LiveStates:
    """Gives the live states of this rank, when its agent asks for them, or when it ends by a failure.

    Args:
        gifts: the files of the agent.
        place: number of this rank among those of the agent.
        n_ranks: number of these.
        asks: descriptor that can be read when the agent asks.
    """

    def __init__(self, gifts: Gifts, place: int, n_ranks: int, asks: int) -> None:
        self._gifts = gifts
        self._place, self._n_ranks, self._asks = place, n_ranks, asks
        self._open: Label | None = None  # the step after which states are as they were; None while they change
        self._condition = threading.Condition()
        self._adapters: Mapping[str, Adapter] = {}
        self._sharing: set[str] = set()  # names of objects with shared arrays
        self._n_bytes = 0  # of these arrays
        self._was_closed = False  # whether an update was seen in this step
        self._is_given = False
        self._has_ended = False

    def start(self, adapters: Mapping[str, Adapter]) -> None:
        """Begin to wait for requests."""
        self._adapters = adapters
        supervisor.parting = self.give
        atexit.register(self.give)
        threading.Thread(target=self._wait, name="distopt live states", daemon=True).start()

    def end(self) -> None:
        """The states are needed no more."""
        self._has_ended = True
        supervisor.parting = None

    def close(self) -> None:
        """States change from now on; while they are written, wait."""
        if threading.current_thread() is not threading.main_thread() and self._open is None:
            return
        with self._condition:
            self._open, self._was_closed = None, True
        if self._is_given and not self._has_ended:
            time.sleep(_REST_SECONDS)  # the agent ends this rank

    def note(self, sharing: set[str], n_bytes: int) -> None:
        """Note which objects have shared arrays, and the bytes of these; before, none are given."""
        self._sharing = sharing
        if n_bytes != self._n_bytes:
            self._n_bytes = n_bytes
            supervisor.send("gives", bytes=n_bytes)

    def reopen(self, label: Label) -> None:
        """A step is done; if no update was seen in it, states may change at any time, and stay closed."""
        with self._condition:
            self._open = label if self._was_closed else None
            self._was_closed = False
            self._condition.notify_all()

    @property
    def is_given(self) -> bool:
        """Whether the states have been given: records of later steps would overwrite those that go with them."""
        return self._is_given

    def give(self) -> None:
        """Write the states, if they can be had; idempotent."""
        with self._condition:
            if self._is_given or self._has_ended or not self._sharing:
                return
            # The main thread does not wait: if it ends in the middle of an update, there is nothing to give.
            waits = threading.current_thread() is not threading.main_thread()
            seconds = seconds_to_give(self._n_bytes) if waits else 0.0
            self._condition.wait_for(lambda: self._open is not None, seconds)
            if (label := self._open) is not None:
                with suppress(Exception):  # the copy counts then; the rank is about to end
                    self._write(label)
            self._is_given = True
            supervisor.send("gave")  # at once: the end of a rank that fails may take seconds

    def _write(self, label: Label) -> None:
        arrays: dict[str, Any] = {}
        notes = {}
        for name in self._sharing:
            adapter = self._adapters[name]
            state = adapter.live()
            same = adapter.shared(state.arrays) - adapter.own().arrays.keys()
            arrays.update({f"{name}/{key}": state.arrays[key] for key in same})
            notes[name] = state.notes
        self._gifts.write(label, arrays, notes, self._place * len(arrays) // self._n_ranks)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._asks, select.POLLIN)
        poll.poll()
        self.give()
        if not self._is_given:  # there was nothing to give
            supervisor.send("gave")
