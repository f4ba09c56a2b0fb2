"""Long waits of one communicator over MPI: they sleep, find out who is missing, and end."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ... import _core
from ...errors import Process
from ...launch.join.mpi import after_closing
from ...launch.stopwatch import Stopwatch
from ...settings import Settings
from .notes import MpiNotes
from .peers import LocalPeers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...launch.join.mpi import MpiJob

__all__ = ["Waits"]

_log = logging.getLogger("distopt")

_ANSWER_SECONDS = 0.2  # in which ranks that wait hear of each other
_FAREWELL_SECONDS = 1.0  # that the others have to close their communicators at the end

_closed: list[MpiNotes] = []


class Waits:
    """One rank's waits.

    Attributes:
        processes: of every rank.
        settings: time-outs.
        help: moves what is under way beside the collectives.
    """

    def __init__(self, mpi: Any, job: MpiJob) -> None:
        """Collective. `mpi` is the module `mpi4py.MPI`."""
        self._mpi = mpi
        self._rank = job.topology.rank
        self.settings = Settings.from_env()
        # First, because it does not wait without end for a rank that will not come, as Dup does.
        pids = [int.from_bytes(pid, "little") for pid in job.all_gather(os.getpid().to_bytes(4, "little"))]
        self.processes = list(map(Process, job.numbers, job.topology.hosts, pids))
        self._peers = LocalPeers({r: pids[r] for r in job.local_ranks if r != self._rank})
        self._notes = MpiNotes(mpi, job.comm.Dup())
        self.help: Callable[[], object] = lambda: None

    @property
    def me(self) -> Process:
        """Local. This rank."""
        return self.processes[self._rank]

    def wait_for(self, core: _core.MpiCommunicator, operation: _core.MpiOperation, timeout: float | None) -> None:
        """Wait for `operation`, at most `timeout` seconds (default: `Settings.timeout`); see `Work.wait`."""

        def move() -> bool:
            self.help()
            return core.wait_on(operation, _core.yield_seconds)

        def check() -> None:
            for rank, finished in self._notes.closed.items():
                if operation.sequence >= finished:
                    core.fail(
                        "CommunicatorClosedError",
                        f"{self.me.name} waits in {operation}, but {self.processes[rank].name} has closed the "
                        "communicator",
                        "every rank must call the same collectives before it ends",
                        [self.processes[rank]],
                    )

        self.wait_until(
            core, move, check, lambda: self._waiting_in(core, operation), timeout, lambda _: core.quiet_seconds
        )

    def wait_for_message(
        self,
        core: _core.MpiCommunicator,
        peer: int,
        done: Callable[[], bool],
        waiting: Callable[[], str],
        timeout: float | None,
    ) -> None:
        """Wait for the end of a message; see `Work.wait`.

        Args:
            core: the communicator that fails where it can come no more.
            peer: rank at the other end; -1: any.
            done: moves messages and collectives; whether it has ended.
            waiting: the wait in words.
            timeout: in seconds (default: `Settings.timeout`).
        """
        others = self._others() if peer < 0 else [peer]

        def check() -> None:
            if all(rank in self._notes.closed for rank in others) and not done():
                left = [self.processes[rank] for rank in others]
                names = ", ".join(one.name for one in left)
                core.fail(
                    "CommunicatorClosedError",
                    f"{names} closed the communicator while {waiting()}",
                    "see its output",
                    left,
                )

        self.wait_until(
            core,
            done,
            check,
            lambda: (waiting(), [self.processes[rank] for rank in others]),
            timeout,
            lambda waited: waited,
        )

    def wait_until(
        self,
        core: _core.MpiCommunicator,
        move: Callable[[], bool],
        check: Callable[[], None],
        tell: Callable[[], tuple[str, list[Process]]],
        timeout: float | None,
        quiet: Callable[[float], float],
    ) -> None:
        """Wait until `move` returns True.

        Args:
            core: the communicator that fails if this takes too long.
            move: moves what is awaited; whether it has ended.
            check: raises an error if it can end no more.
            tell: the wait in words, and who has not arrived.
            timeout: in seconds (default: `Settings.timeout`).
            quiet: after so many seconds, for how long nothing has moved.
        """
        timeout = self.settings.timeout if timeout is None else timeout
        watch = Stopwatch()
        answer = min(_ANSWER_SECONDS, timeout / 4)
        warn_at = min(self.settings.stall_warning, timeout / 2) + answer
        patience = _core.Patience(timeout, warn_at)
        asks = [warn_at - answer, timeout - answer]
        told = float("-inf")
        while not move():
            waited = watch.seconds()
            _core.pause(quiet(waited))
            # A rank that hears of another's wait while it waits itself says so: who is silent is the one to blame. Not
            # twice in a short time, since an answer to every answer would never end.
            heard = self._notes.read()
            asks_now = bool(asks) and waited > asks[0]
            if asks_now or (heard and waited > told + 2 * _ANSWER_SECONDS):
                told = waited
                self._notes.tell_waiting()
            if asks_now:
                asks.pop(0)
            check()
            lost = self._peers.lost()
            if lost is not None:
                ended, text = self.processes[lost], tell()[0]
                core.fail("PeerLostError", f"{ended.name} ended while {text}", "see its output", [ended])
            core.look(patience, waited, tell, _log.warning)

    def close(self, core: _core.MpiCommunicator) -> None:
        """Local. Tell the others that this rank leaves."""
        self._peers.close()
        self._notes.tell_closed(self._oldest(core))
        _closed.append(self._notes)
        if len(_closed) == 1:
            after_closing(_read_farewells)

    def _oldest(self, core: _core.MpiCommunicator) -> int:
        """Number of the first operation that this rank has not finished."""
        return core.started if core.oldest is None else core.oldest.sequence

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank != self._rank]

    def _waiting_in(self, core: _core.MpiCommunicator, operation: _core.MpiOperation) -> tuple[str, list[Process]]:
        since = time.monotonic() - 3 * _ANSWER_SECONDS
        # Where all have begun, one may have stopped since. Whoever waits itself has not, be it in an earlier operation.
        suspects = (core.oldest and core.oldest.unheard) or self._others()
        absent = [self.processes[rank] for rank in suspects if self._notes.waiting.get(rank, 0.0) < since]
        last = f"the last operation that all have started is {core.last_agreed}"
        return (
            f"{self.me.name} waits in {operation} for {', '.join(one.name for one in absent) or 'slow transfers'}; "
            f"{last if core.last_agreed else 'none was started'}"
        ), absent


def _read_farewells() -> None:
    """Take in what peers sent when they closed: UCX warns of messages that nobody has received."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for notes in _closed:
        while not notes.all_closed() and time.monotonic() < deadline:
            notes.read()
            time.sleep(1e-4)
