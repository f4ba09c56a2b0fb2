"""Long waits of one communicator: they sleep, find out who is missing, and end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ... import _core
from ...errors import CommunicatorClosedError, CommunicatorError, PeerLostError, Process, StalledError
from ...launch.stopwatch import Stopwatch
from ...settings import Settings
from .network import Network, Peers
from .notes import Notes
from .peers import LostPeers

_log = logging.getLogger("distopt")

_ANSWER_SECONDS = 0.2  # ranks that wait answer each other within this time; a silent one is blamed


class _Awaited(Protocol):
    peer: int

    def moved(self) -> bool: ...
    def waiting(self) -> str: ...


class ClosedWaits:
    """In the place of the waits of a closed communicator, for a thread that is still in it.

    Hazard: `Waits` refers to the communicator. The two would keep each other, and connections, until Python's next
    collection of garbage, which may be hours later.
    """

    def __init__(self, me: Process) -> None:
        self._me = me

    def wait_for(self, operation: _core.NetCollective, timeout: float | None) -> None:
        """Local. Refuse the wait."""
        fact = f"{self._me.name} closed its communicator while it waited in {operation}"
        raise CommunicatorClosedError(fact, cure="close it when all operations have ended", ranks=[self._me])

    def polled(self) -> None:
        """Local. The next call is refused."""


class Waits:
    """One rank's waits.

    Attributes:
        core: the communicator whose operations it waits for; set once it is made.
        processes: of every rank.
        settings: time-outs.
        help: moves operations in progress other than collectives.
    """

    core: _core.NetCommunicator

    def __init__(self, job: Peers, network: Network, settings: Settings) -> None:
        """Collective."""
        self._rank = job.topology.rank
        self.settings = settings
        # First, because it has a timeout: a transport may wait forever for an absent rank.
        pids = [int.from_bytes(pid, "little") for pid in job.all_gather(os.getpid().to_bytes(4, "little"))]
        self.processes = list(map(Process, job.numbers, job.topology.hosts, pids))
        transport = network.open()
        self._peers = LostPeers({r: pids[r] for r in job.local_ranks if r != self._rank}, transport)
        self._notes = Notes(transport, self._rank, job.topology.world_size)
        self._has_failed = False
        self._said = float("-inf")  # when the others last heard that this rank waits
        self.help: Callable[[], object] = _no_help
        self.abort_reason = ""  # set by another thread: the reason to end all waits

    @property
    def me(self) -> Process:
        """Local. This rank."""
        return self.processes[self._rank]

    def polled(self) -> None:
        """Local. Do all that a wait does for a rank that polls, except to move its collective."""
        self.help()
        self.answer()

    def answer(self, *, asks: bool = False) -> None:
        """Local. If others note that they wait, note that this rank waits or polls, too; in any case if it `asks`.

        A silent rank is blamed. A rank answers once in a short time only: answers to answers would never end.
        """
        heard, now = self._notes.read(), time.monotonic()
        if asks or (heard and now > self._said + 2 * _ANSWER_SECONDS):
            self._said = now
            self._notes.send()

    def wait_for(self, operation: _core.NetCollective, timeout: float | None) -> None:
        """Wait for `operation`, at most `timeout` seconds (default: `Settings.timeout`); see `Work.wait`."""

        def move() -> bool:
            self.help()
            return self.core.wait_on(operation, _core.yield_seconds)

        def check() -> None:
            for rank, finished in self._notes.closed.items():
                if operation.sequence >= finished:
                    closed, cure = self.processes[rank], "every rank must call the same collectives before it ends"
                    fact = f"{self.me.name} waits in {operation}, but {closed.name} has closed the communicator"
                    self._fail(CommunicatorClosedError(fact, cure=cure, ranks=[closed]))

        self._wait(move, check, lambda: self._waiting_in(operation), timeout, lambda _: self.core.quiet_seconds)

    def wait_for_message(self, message: _Awaited, timeout: float | None) -> None:
        """Wait for the end of `message`, at most `timeout` seconds (default: `Settings.timeout`); see `Work.wait`."""
        ranks = self._others() if message.peer < 0 else [message.peer]
        others = [self.processes[rank] for rank in ranks]

        def check() -> None:
            if all(rank in self._notes.closed for rank in ranks) and not message.moved():
                names = ", ".join(one.name for one in others)
                fact = f"{names} closed the communicator while {message.waiting()}"
                self._fail(CommunicatorClosedError(fact, cure="see its output", ranks=others))

        self._wait(message.moved, check, lambda: (message.waiting(), others), timeout, lambda waited: waited)

    def _wait(
        self,
        move: Callable[[], bool],
        check: Callable[[], None],
        describe: Callable[[], tuple[str, list[Process]]],
        timeout: float | None,
        quiet: Callable[[float], float],
    ) -> None:
        """Wait until `move` returns True.

        Args:
            move: moves the awaited operation; returns whether it has ended.
            check: raises an error if it can end no more.
            describe: the wait as text, and the ranks that have not arrived.
            timeout: in seconds (default: `Settings.timeout`).
            quiet: takes the seconds waited, and returns the seconds in which nothing has moved.
        """
        timeout = self.settings.timeout if timeout is None else timeout
        clock = Stopwatch()
        answer = min(_ANSWER_SECONDS, timeout / 4)
        warn_at = min(self.settings.stall_warning, timeout / 2) + answer
        patience = _core.Patience(timeout, warn_at)
        asks = [warn_at - answer, timeout - answer]
        try:
            while not move():
                waited = clock.seconds()
                self.core.pause(quiet(waited))
                asks_now = bool(asks) and waited > asks[0]
                if asks_now:
                    asks.pop(0)
                self.answer(asks=asks_now)
                check()
                if self.abort_reason:
                    self._fail(CommunicatorClosedError(f"{describe()[0]}, and was interrupted: {self.abort_reason}"))
                lost = self._peers.lost(self._notes.failed)
                if lost is not None:
                    ended, text = self.processes[lost], describe()[0]
                    self._fail(PeerLostError(f"{ended.name} ended while {text}", cure="see its output", ranks=[ended]))
                self.core.check_patience(patience, waited, describe, _log.warning)
        except CommunicatorError as error:
            self._note_failure(error)
            raise

    def _fail(self, error: CommunicatorError) -> None:
        """Raise an error, now and in all later calls.

        If it names a rank that has failed itself, and has noted why, that error is nearer to the cause, and so on.
        """
        passed = {self.me}
        while (
            (error.is_consequence or isinstance(error, StalledError)) and error.ranks and error.ranks[0] not in passed
        ):
            passed.add(error.ranks[0])
            noted = self._notes.failed.get(self.processes.index(error.ranks[0]))
            if noted is None:
                break
            error = noted
        self.core.fail(type(error).__name__, error.fact, error.cure, error.ranks)

    def close(self, *, says: bool) -> None:
        """Local. Notify the others, if it `says` so, that this rank leaves, and how many operations it has finished."""
        oldest = self.core.oldest
        self._peers.close()
        if not says:
            return
        # An operation that failed outside of a long wait, such as one that differs from the others', has left no note;
        # a rank that is still in it would blame this one for leaving.
        try:
            self.core.assist()
        except CommunicatorError as error:
            self._note_failure(error)
        self._notes.send(self.core.next_number if oldest is None else oldest.sequence)

    def _note_failure(self, error: CommunicatorError) -> None:
        if not self._has_failed:
            self._has_failed = True
            with suppress(CommunicatorError):  # the network itself has failed
                self._notes.send_failure(error)

    def release(self) -> ClosedWaits:
        """Local. Forget the communicator's messages; returns what takes the place of this object."""
        self.help = _no_help
        return ClosedWaits(self.me)

    def read_last(self) -> None:
        """Local. Read the notes of ranks that leave, for a moment."""
        self._notes.read_last()

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank != self._rank]

    def _waiting_in(self, operation: _core.NetCollective) -> tuple[str, list[Process]]:
        core, since = self.core, time.monotonic() - 3 * _ANSWER_SECONDS
        # If all have begun, one may have stopped since. A rank that itself waits, even in an earlier one, has not.
        suspects = (core.oldest and core.oldest.unheard) or self._others()
        absent = [self.processes[rank] for rank in suspects if self._notes.waiting.get(rank, 0.0) < since]
        last = f"the last operation that all have started is {core.last_agreed}"
        return (
            f"{self.me.name} waits in {operation} for {', '.join(one.name for one in absent) or 'slow transfers'}; "
            f"{last if core.last_agreed else 'none was started'}"
        ), absent


def _no_help() -> None:
    """Do nothing: the communicator has no other operations."""
