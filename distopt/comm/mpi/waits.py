"""Long waits of one communicator over MPI: they sleep, find out who is missing, and end."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from ...launch.join.mpi import after_closing
from ...launch.stopwatch import Stopwatch
from ...settings import Settings
from .notes import MpiNotes
from .peers import LocalPeers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ... import _core
    from ...launch.join.mpi import MpiJob

__all__ = ["YIELD_SECONDS", "Waits"]

_log = logging.getLogger("distopt")

# A wait in which nothing moves yields the processor before it sleeps: MPI moves bytes only while it is called, so a
# sleep in the middle of a transfer leaves the network idle.
YIELD_SECONDS = 0.01
_LONGEST_SLEEP_SECONDS = 1e-3
_ANSWER_SECONDS = 0.2  # in which ranks that wait hear of each other
_FAREWELL_SECONDS = 1.0  # that the others have to close their communicators at the end

_closed: list[MpiNotes] = []


class Waits:
    """One rank's waits.

    Attributes:
        names: of every rank, for messages.
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
        self.names = [
            f"rank {number} on {host} (pid {pid})"
            for number, host, pid in zip(job.numbers, job.topology.hosts, pids, strict=True)
        ]
        self._peers = LocalPeers({r: pids[r] for r in job.local_ranks if r != self._rank})
        self._notes = MpiNotes(mpi, job.comm.Dup())
        self.help: Callable[[], object] = lambda: None

    def wait_for(self, core: _core.MpiCommunicator, operation: _core.MpiOperation, timeout: float | None) -> None:
        """Wait for `operation`, at most `timeout` seconds (default: `Settings.timeout`); see `Work.wait`."""
        timeout = self.settings.timeout if timeout is None else timeout
        watch = Stopwatch()
        answer = min(_ANSWER_SECONDS, timeout / 4)
        warn_at = min(self.settings.stall_warning, timeout / 2) + answer
        asks = [warn_at - answer, timeout - answer]
        told = float("-inf")
        while not core.wait_on(operation, YIELD_SECONDS):
            # A late peer costs no processor. The sleep grows with the time in which nothing has moved.
            time.sleep(min(_LONGEST_SLEEP_SECONDS, core.quiet_seconds / 100))
            waited = watch.seconds()
            # A rank that hears of another's wait while it waits itself says so: who is silent is the one to blame. Not
            # twice in a short time, since an answer to every answer would never end.
            heard = self._notes.read()
            asks_now = bool(asks) and waited > asks[0]
            if asks_now or (heard and waited > told + 2 * _ANSWER_SECONDS):
                told = waited
                self._notes.tell_waiting()
            if asks_now:
                asks.pop(0)
            self.help()
            self._check_peers(core, operation)
            if waited > warn_at:
                warn_at = float("inf")
                _log.warning("%s", self._waiting_for(core, operation, waited))
            if waited > timeout:
                text = self._waiting_for(core, operation, waited)
                core.fail("StalledError", f"{text}; find out what holds them, or raise DISTOPT_TIMEOUT")

    def check_sender(
        self, core: _core.MpiCommunicator, peer: int, waiting: Callable[[], str], done: Callable[[], bool]
    ) -> None:
        """Local. Raise an error if the message of a wait can come no more.

        Args:
            core: the communicator that fails then.
            peer: rank at the other end; -1: any.
            waiting: the wait in words.
            done: looks once more.
        """
        self._notes.read()
        others = [rank for rank in range(len(self.names)) if rank != self._rank] if peer < 0 else [peer]
        if all(rank in self._notes.closed for rank in others) and not done():
            names = ", ".join(self.names[rank] for rank in others)
            core.fail("CommunicatorClosedError", f"{names} closed the communicator while {waiting()}; see its output")
        lost = self._peers.lost()
        if lost is not None:
            core.fail("PeerLostError", f"{self.names[lost]} ended while {waiting()}; see its output")

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

    def _waiting_for(self, core: _core.MpiCommunicator, operation: _core.MpiOperation, seconds: float) -> str:
        since = time.monotonic() - 3 * _ANSWER_SECONDS
        others = [rank for rank in range(len(self.names)) if rank != self._rank]
        # Where all have begun, one may have stopped since. Whoever waits itself has not, be it in an earlier operation.
        suspects = (core.oldest and core.oldest.unheard) or others
        absent = [self.names[rank] for rank in suspects if self._notes.waiting.get(rank, 0.0) < since]
        last = f"the last operation that all have started is {core.last_agreed}"
        return (
            f"{self.names[self._rank]} has waited {seconds:.1f} s in {operation} for "
            f"{', '.join(absent) or 'slow transfers'}; {last if core.last_agreed else 'none was started'}"
        )

    def _check_peers(self, core: _core.MpiCommunicator, operation: _core.MpiOperation) -> None:
        me = self.names[self._rank]
        for rank, finished in self._notes.closed.items():
            if operation.sequence >= finished:
                core.fail(
                    "CommunicatorClosedError",
                    f"{me} waits in {operation}, but {self.names[rank]} has closed the communicator; every rank must "
                    "call the same collectives before it ends",
                )
        lost = self._peers.lost()
        if lost is not None:
            core.fail("PeerLostError", f"{self.names[lost]} ended while {me} waits in {operation}; see its output")


def _read_farewells() -> None:
    """Take in what peers sent when they closed: UCX warns of messages that nobody has received."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for notes in _closed:
        while not notes.all_closed() and time.monotonic() < deadline:
            notes.read()
            time.sleep(1e-4)
