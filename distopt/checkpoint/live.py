"""Survivors of a fault give their live states: the shared arrays as they are after the last step.

A collective that fails leaves parameters and the optimizer as the last step has left them. From an optimizer's update
to the end of the step they are closed: a thread that waits for the agent's request waits for that end, and while it
writes, the next update waits. The ranks of an agent write one file together: each writes the arrays that the others
have not written, so that it becomes whole though some of them end meanwhile. Ranks at another step write another file.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ..launch.end_together.report import supervisor
from ..launch.heal.state_slots import HEADER, read_all, seconds_to_give, write_all
from .adapters import copy_of
from .kept import Held, Label, aligned, described

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..files import Arrays
    from .adapters import Adapter

_LOCK_SECONDS = 0.2  # then another rank is stopped while it prepares the file
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
        """Local. A description of the states in whole files, by this rank."""
        contents = [content for content in map(_whole, self._fds) if content is not None]
        return [Held(Label(*content["label"]), (rank, 1), {}, "gift") for content, _ in contents]

    def read(self, label: Label) -> tuple[Arrays, dict[str, Any]] | None:
        """Local. Shared arrays, and notes of their objects, of this label; None if no whole file has them."""
        for i, fd in enumerate(self._fds):
            content = _whole(fd)
            if content is not None and Label(*content[0]["label"]) == label:
                self.source = i
                text, begin = content
                arrays = {}
                for key, dtype, shape in text["arrays"]:
                    array = np.empty(shape, dtype)
                    array.reshape(-1).view(np.uint8)[:] = read_all(fd, array.nbytes, begin)
                    arrays[key] = array
                    begin += aligned(array.nbytes)
                return arrays, text["notes"]
        return None

    def forget(self, label: Label) -> None:
        """Local. Give back the memory of older states: copies have taken their place."""
        for fd in self._fds:
            content = _whole(fd)
            if content is not None and Label(*content[0]["label"]) < label:
                os.ftruncate(fd, 0)

    def write(self, label: Label, arrays: Mapping[str, Any], notes: Mapping[str, Any], place: int) -> None:
        """Local. Write the arrays that other ranks of the agent do not write."""
        files = [fd for i, fd in enumerate(self._fds) if i != self.source]
        fd = files[label.step % 2]
        names = sorted(arrays)
        text = json.dumps(
            {
                "label": label,
                "arrays": [[key, arrays[key].dtype.str, arrays[key].shape] for key in names],
                "notes": notes,
            },
            sort_keys=True,
        ).encode()
        begins = [aligned(HEADER.size + len(text))]
        for key in names:
            begins.append(begins[-1] + aligned(arrays[key].nbytes))
        with _locked(fd):
            header = HEADER.unpack(os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))
            if header[3] != len(text) or read_all(fd, len(text), HEADER.size) != text:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, begins[-1] + len(names))
                write_all(fd, text, HEADER.size)
                os.pwrite(fd, HEADER.pack(label.step, 0, begins[-1], len(text), label.step + 1), 0)
        for i in [*range(place, len(names)), *range(min(place, len(names)))]:
            if os.pread(fd, 1, begins[-1] + i) == b"\0":
                write_all(
                    fd, np.ascontiguousarray(copy_of(arrays[names[i]])).reshape(-1).view(np.uint8).data, begins[i]
                )
                os.pwrite(fd, b"\1", begins[-1] + i)


def _whole(fd: int) -> tuple[dict[str, Any], int] | None:
    """The JSON of a file, and where its arrays begin; None if it is not whole."""
    header = os.pread(fd, HEADER.size, 0)
    if len(header) < HEADER.size or not header.strip(b"\0"):
        return None
    _, _, end, length, _ = HEADER.unpack(header)
    content, begin = described(os.pread(fd, HEADER.size + length, 0))
    flags = os.pread(fd, len(content["arrays"]) + 1, end)
    return (content, begin) if flags == b"\1" * len(content["arrays"]) else None


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
        """Local. Begin to wait for requests."""
        self._adapters = adapters
        supervisor.parting = self.give
        atexit.register(self.give)
        threading.Thread(target=self._wait, name="distopt live states", daemon=True).start()

    def end(self) -> None:
        """Local. The states are needed no more."""
        self._has_ended = True
        supervisor.parting = _nothing

    def close(self) -> None:
        """Local. States change from now on; while they are written, wait."""
        if threading.current_thread() is not threading.main_thread() and self._open is None:
            return
        with self._condition:
            self._open, self._was_closed = None, True
        if self._is_given and not self._has_ended:
            time.sleep(_REST_SECONDS)  # the agent ends this rank

    def note(self, sharing: set[str], n_bytes: int) -> None:
        """Local. Note which objects have shared arrays, and the bytes of these; before, none are given."""
        self._sharing = sharing
        if n_bytes != self._n_bytes:
            self._n_bytes = n_bytes
            supervisor.send("gives", bytes=n_bytes)

    def reopen(self, label: Label) -> None:
        """Local. A step is done; if no update was seen in it, states may change at any time, and stay closed."""
        with self._condition:
            self._open = label if self._was_closed else None
            self._was_closed = False
            self._condition.notify_all()

    @property
    def is_given(self) -> bool:
        """Local. Whether the states have been given: records of later steps would overwrite those that go with them."""
        return self._is_given

    def give(self) -> None:
        """Local. Write the states, if they can be had; idempotent."""
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


def _nothing() -> None:
    pass
