"""A worker's side of the service: a thread gives signs of life, hears who takes part, and gives states to newcomers.

The thread connects again whenever the service cannot be reached, and says again what the worker has said last. The
worker's own thread takes the messages one by one (`next`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import LaunchError, UsageError
from ...settings import Settings
from ..addresses import listen_somewhere
from ..agents.node import NO_RANK
from ..gate import FOR_MEMBERS, FOR_STATES, LONGEST_CALL_SECONDS, Calling, Gate, Link, RefusedError, call
from ..keys import MISSING, VALUES, Missing, Wanted, request, unpack
from ..rendezvous.key_value import KeyValueClient
from ..sockets import close_in_children, handle_events, receive_exactly, say
from ..stopwatch import Deadline, Stopwatch
from .membership import SILENT_SECONDS
from .variables import Place

_log = logging.getLogger("distopt")
_BACKLOG = 16
_BEAT_SECONDS = 0.3
_LEAVE_SECONDS = 2.0
_PAUSE_SECONDS = 0.1  # between two calls of the service
_COPY_SECONDS = 3.0  # then a member that sends nothing of its states counts as lost
_LENGTHS = struct.Struct("!QQ")  # of the header and of the states that a member sends

Provide = Callable[[], tuple[dict[str, Any], memoryview]]


class AbortedError(LaunchError):
    """The trial has been aborted."""


class _States(Gate):
    """Gives the states of this member to those who copy them."""

    def __init__(self, key: bytes, selector: selectors.BaseSelector, provide: Provide) -> None:
        super().__init__(key, selector)
        self._provide = provide

    def _refusal(self, link: Link, size: int) -> str:
        return "" if link.purpose == FOR_STATES else "here are only states"

    def _admitted(self, link: Link) -> None:
        self._selector.unregister(link.socket)
        del self._links[link]
        threading.Thread(target=self._give, args=[link.socket], daemon=True, name="distopt states").start()

    def _give(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link:
            header, states = self._provide()
            text = json.dumps(header).encode()
            link.settimeout(_COPY_SECONDS)
            for left in (memoryview(_LENGTHS.pack(len(text), len(states)) + text), states):
                while left:
                    left = left[link.send(left) :]


class WorkersClient:
    """The service, for the first rank of a worker.

    Args:
        place: where it is.
        hello: what this worker says first; see `distopt.launch.workers`.
        provide: makes a header and the states that newcomers copy; called in another thread.

    Attributes:
        number: of this worker among those that ever joined.
        place: the argument.
        host: of the service, or where it was last.
        on_abort: called in the other thread when a trial is aborted that this worker takes part in.
        trial: the trial that this worker takes part in; None: none, or it has been aborted.

    Raises:
        UsageError: the service refuses this worker.
        LaunchError: the service cannot be reached.
    """

    def __init__(self, place: Place, hello: dict[str, Any], provide: Provide, seconds: float) -> None:
        self.place, self.number, self.host = place, -1, ""
        self._address: tuple[str, int] | None = None  # of the service that it has called last
        self._calling: Calling | None = None
        self._call_at = 0.0
        self.on_abort: Callable[[str], None] = lambda _: None
        self.trial: int | None = None
        self._hello, self._seconds = hello, seconds
        self._changed = threading.Condition()
        self._inbox: deque[dict[str, Any]] = deque()
        self._values: dict[str, Any] | None = None
        self._holds: dict[str, Any] | None = None  # what to say again
        self._wants: dict[str, Any] | None = None
        self._failure: Exception | None = None
        self._is_closed = self._is_cut = False
        self._link: socket.socket | None = None
        self._received, self._heard = b"", 0.0
        self._selector = selectors.DefaultSelector()
        self._states = _States(place.key, self._selector, provide)
        listener = listen_somewhere(Settings.from_env().ports, _BACKLOG)
        self._states.listen(listener)
        self._hello["port"] = listener.getsockname()[1]
        close_in_children(listener)
        self._thread = threading.Thread(target=self._run, daemon=True, name="distopt workers")
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self.number >= 0 or self._failure is not None, seconds):
                self._failure = LaunchError(f"no distopt run --workers has named the members within {seconds:g} s")
        self._check()

    # -- for the thread that trains ----------------------------------------------------------------------------------
    def say(self, what: str, **content: Any) -> None:
        """Say something to the service, if it can be reached."""
        with self._changed:
            if what in {"member", "done"}:
                self._holds, self._wants = {"say": what, **content}, None
            elif what == "ready":
                self._wants = {"say": what, **content}
            elif what == "join":
                self._holds, self._wants = {"say": what, **content}, None
            if what != "member":  # which the service knows
                self._send({"say": what, **content})

    def next(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message of the service, once it has come; None after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._failure is not None, seconds)
            self._check()
            return self._inbox.popleft() if self._inbox else None

    def take_part(self, trial: int) -> None:
        """This worker begins a trial, unless it has been aborted already."""
        with self._changed:
            if any(
                message["do"] in {"abort", "cut"} and message.get("trial", trial) == trial for message in self._inbox
            ):
                raise AbortedError("the trial has been aborted")
            self.trial = trial

    def exchange(self, epoch: int, content: bytes) -> tuple[int, bytes]:
        """A request to the values by which members meet, and the answer.

        Raises:
            AbortedError: the trial has been aborted.
        """
        with self._changed:
            self._values = None
            self._send({"say": "ask", "epoch": epoch, "content": content.hex()})
            self._changed.wait_for(lambda: self._values or self.trial is None, self._seconds)
            answer = self._answer()
        if answer is None:
            raise AbortedError("the trial has been aborted")
        return answer["kind"], bytes.fromhex(answer["content"])

    def copy(self, host: str, port: int) -> Copy:
        """Begin to copy the states of a member; messages "header", "copied" or "lost" follow, with the copy."""
        return Copy(self, host, port)

    def put(self, message: dict[str, Any]) -> None:
        """Add a message to those of the service."""
        with self._changed:
            self._inbox.append(message)
            self._changed.notify_all()

    def close(self) -> None:
        """Leave; idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._send({"say": "bye"})
            self._is_closed = True
        self._thread.join(_LEAVE_SECONDS)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _answer(self) -> dict[str, Any] | None:
        answer, self._values = self._values, None
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            say(self._link, json.dumps(message))

    # -- the other thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        beat_at = 0.0
        try:
            while not self._is_closed:
                if self._link is None:
                    self._call()
                handle_events(self._selector, _PAUSE_SECONDS)
                now = time.monotonic()
                if self._link is not None and now > beat_at:
                    beat_at = now + _BEAT_SECONDS
                    with self._changed:
                        self._send({"say": "beat"})
                if self._link is not None and (now > self._heard + SILENT_SECONDS or self._has_moved()):
                    self._lose()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._states.close()
            for end in (self._link, self._calling):
                if end is not None:
                    end.close()

    def _call(self) -> None:
        """Call the service that is known, without a wait: one that is frozen never answers, and another may follow."""
        if self._calling is not None and self._has_moved():
            self._calling.close()
            self._calling = None
        if self._calling is not None:
            self._calling.check_time()
        elif time.monotonic() > self._call_at and (address := self.place.find()) is not None:
            self._call_at = time.monotonic() + _PAUSE_SECONDS
            self._address, key = address, self.place.key
            known = NO_RANK if self.number < 0 else self.number
            self._calling = Calling(address, key, FOR_MEMBERS, known, 0, self._selector, self._called)

    def _called(self, link: socket.socket | Exception) -> None:
        self._calling = None
        if isinstance(link, RefusedError):
            raise LaunchError(f"the service of workers refuses this one: {link}")
        if isinstance(link, Exception):
            return
        assert self._address is not None
        self.host, _ = self._address
        close_in_children(link)
        self._received, self._heard = b"", time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, self._read)
        if self._is_cut:
            _log.warning("worker %d reaches the other workers again", self.number)
            self._is_cut = False
        with self._changed:
            self._link = link
            number = None if self.number < 0 else self.number
            self._send({"say": "hello", "number": number, **self._hello})
            for message in (self._holds, self._wants):
                if message is not None:
                    self._send(message)

    def _has_moved(self) -> bool:
        """Whether another service has taken the place of this one."""
        return self.place.find() not in (None, self._address)

    def _lose(self) -> None:
        assert self._link is not None
        self._selector.unregister(self._link)
        self._link.close()
        if not (self._is_cut or self._is_closed):
            _log.warning("worker %d does not reach the other workers; it trains on to its next average", self.number)
        self._is_cut = True
        with self._changed:
            self._link = None
            self._inbox.append({"do": "cut"})
            self._end_trial(self.trial)

    def _read(self) -> None:
        assert self._link is not None
        try:
            part = self._link.recv(1 << 16)
        except OSError:
            part = b""
        if not part:
            self._lose()
            return
        self._heard = time.monotonic()
        *lines, self._received = (self._received + part).split(b"\n")
        with self._changed:
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        do = message["do"]
        if do == "beat":
            return
        if do == "refuse":
            self._failure = UsageError(message["text"])
        elif do == "welcome":
            self.number = message["number"]
        elif do == "values":
            self._values = message
        else:
            if do == "commit":
                self._wants = None
            self._inbox.append(message)
            if do == "abort":
                self._end_trial(message["trial"])
        self._changed.notify_all()

    def _end_trial(self, trial: int | None) -> None:
        if trial is not None and trial == self.trial:
            self.trial = None
            self.on_abort("another worker was lost, or this one was cut off")
        self._changed.notify_all()


class Copy:
    """States of a member, on their way.

    Attributes:
        header: what the member says of them.
        states: once they have come.
    """

    def __init__(self, client: WorkersClient, host: str, port: int) -> None:
        self._client, self._address = client, (host, port)
        self.header: dict[str, Any] = {}
        self.states = b""
        self._gives_up = False
        threading.Thread(target=self._run, daemon=True, name="distopt copy").start()

    def stop(self) -> None:
        """Ask the thread to stop copying; it may still run for a moment."""
        self._gives_up = True

    def _run(self) -> None:
        client = self._client
        try:
            clock = Stopwatch(LONGEST_CALL_SECONDS)
            with call(self._address, client.place.key, FOR_STATES, client.number, 0, clock) as link:
                close_in_children(link)
                lengths = receive_exactly(link, _LENGTHS.size, Deadline(_COPY_SECONDS))
                n_header, n_states = _LENGTHS.unpack(lengths)
                self.header = json.loads(receive_exactly(link, n_header, Deadline(_COPY_SECONDS)))
                client.put({"do": "header", "copy": self})
                states, at = bytearray(n_states), 0
                link.settimeout(_COPY_SECONDS)
                while at < n_states and not self._gives_up:
                    count = link.recv_into(memoryview(states)[at:])
                    if not count:
                        raise ConnectionResetError
                    at += count
            self.states = bytes(states)
            client.put({"do": "copied", "copy": self})
        except (OSError, RefusedError):
            client.put({"do": "lost", "copy": self})


class MembersClient(KeyValueClient):
    """The values by which the members of a trial meet.

    Args:
        client: of this worker.
        epoch: of the members.
        members: their numbers.
        seconds: how long a wait lasts.
    """

    def __init__(self, client: WorkersClient, epoch: int, members: Sequence[int], seconds: float) -> None:
        super().__init__(client.number, members, seconds)
        self._client, self._epoch = client, epoch

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes]:
        if wanted is None:
            raise LaunchError("the members of a trial set no keys without a wait")
        kind, answer = self._client.exchange(self._epoch, request(deleted, key, value, wanted))
        if kind == MISSING:
            raise self._error(Missing.all_of(answer), wanted)
        assert kind == VALUES
        return unpack(answer)
