"""The operations under way of one communicator over MPI: their order, their progress and their failure.

The k-th MPI call of each kind of step must be the same operation on all ranks. So the steps have an MPI communicator
each, and no operation overtakes an earlier one into a step. A step of several requests (`Chain`) lets the next
operation in when its last request has started.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CommunicatorClosedError, CommunicatorError, MismatchError, PeerLostError, StalledError
from ...launch.mpi import after_closing
from ...settings import Settings
from ..base import Work
from .fingerprint import Fingerprint, agree, pack
from .notes import MpiNotes
from .peers import LocalPeers
from .steps import Chain, Exchange, Inline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...launch.mpi import MpiJob
    from ..base import Array

__all__ = ["MpiQueue", "MpiWork"]

_log = logging.getLogger("distopt")

# Per rank, and of all ranks together: what travels with the fingerprint, in one step instead of two.
_INLINE_BYTES, _INLINE_BYTES_OF_ALL = 1024, 65536
_YIELD_SECONDS = 0.01  # of a wait, during which it does not sleep
_ANSWER_SECONDS = 0.2  # in which ranks that wait hear of each other
_FAREWELL_SECONDS = 1.0  # that the others have to close their communicators at the end

# Memory that MPI may still read or write: never freed.
_closed: list[tuple[deque[MpiWork], MpiNotes]] = []


class MpiWork(Work):
    """One operation: the steps that its generator gives out, of which the exchange of fingerprints is the first.

    Attributes:
        stage: number of steps that have begun.
    """

    def __init__(
        self, queue: MpiQueue, fingerprint: bytes, arrays: Sequence[Array], steps: Iterator[Any], gate: int
    ) -> None:
        """Local. No step but the first `gate` is taken while an earlier operation uses one of `arrays`."""
        self.arrays = arrays
        self.stage = 0
        self.finished = False
        self._queue = queue
        self._fingerprint = fingerprint
        self._steps = steps
        self._gate = gate
        self._request: Any = None
        self._after = [
            earlier
            for earlier in queue.outstanding
            if any(np.may_share_memory(x, y) for x in arrays for y in earlier.arrays)
        ]

    @property
    def open_stage(self) -> int:
        """Number of the last step that later operations may take."""
        request = self._request
        return self.stage - 1 if isinstance(request, Chain) and not request.all_started else self.stage

    @property
    def mine(self) -> Fingerprint:
        """What this rank says about the operation."""
        return Fingerprint.unpack(self._fingerprint)

    def advance(self, limit: float) -> None:
        """Move on, but into no step beyond number `limit`."""
        while self.stage < limit and not self.finished and (self._request is None or self._request.Test()):
            if self.stage == self._gate:
                # MPI forbids two operations at once on one array, and a later one is to see what an earlier one wrote.
                if any(not earlier.finished for earlier in self._after):
                    return
                self._after = []  # else a chain of works would keep all its arrays alive
            self._request = next(self._steps, None)
            self.stage += 1
            self.finished = self._request is None

    def done(self) -> bool:
        """Local. Move all operations of the communicator forward; whether this one has finished."""
        if not self.finished:
            self._queue.progress()
        return self.finished

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        if not self.finished:
            self._queue.wait_for(self, timeout)


class MpiQueue:
    """One rank's operations, in the order in which they were begun.

    Attributes:
        inline_bytes: size of the data that can travel with the fingerprint.
        outstanding: those that have not finished.
        closed: whether this rank has left.
    """

    def __init__(self, mpi: Any, job: MpiJob) -> None:
        """Collective. `mpi` is the module `mpi4py.MPI`."""
        self.inline_bytes = min(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // job.comm.size) // 8 * 8
        self.outstanding: deque[MpiWork] = deque()
        self._mpi = mpi
        self._topology = job.topology
        self._settings = Settings.from_env()
        # First, because it does not wait without end for a rank that will not come, as Dup does.
        self._pids = [int.from_bytes(pid, "little") for pid in job.all_gather(os.getpid().to_bytes(4, "little"))]
        self._peers = LocalPeers({r: self._pids[r] for r in job.local_ranks if r != job.topology.rank})
        self._exchange = job.comm.Dup()
        self._notes = MpiNotes(mpi, job.comm.Dup())
        self._exchanges: list[Exchange] = []  # of operations that have finished
        self._next_seq = 0
        self._agreed: bytes | None = None  # the last operation that all ranks have begun
        self._failure: CommunicatorError | None = None
        self.closed = False

    # -- progress ----------------------------------------------------------------------------------------------------
    def begin(
        self,
        kind: str,
        arrays: Sequence[Array],
        steps: Iterator[Any] | None,
        dtype: str = "",
        label: str = "",
        *,
        count: int = 0,
        op: str = "",
        root: int = 0,
        inline: Inline | None = None,
    ) -> MpiWork:
        """Collective. Begin an operation on `arrays`: the exchange, with data if they are small, then `steps`."""
        self._check_usable()
        mine = pack(self._next_seq, kind, dtype, count=count, op=op, root=root, label=label)
        self._next_seq += 1
        work = MpiWork(self, mine, arrays, self._run(mine, steps, inline), gate=1 if inline is None else 0)
        self.outstanding.append(work)
        self.progress()
        return work

    def _run(self, mine: bytes, steps: Iterator[Any] | None, inline: Inline | None) -> Iterator[Any]:
        """All steps of an operation."""
        exchange = self._exchanges.pop() if self._exchanges else self._new_exchange()
        yield exchange.start(mine, None if inline is None else inline.payload)
        self._agreed = mine
        for rank, theirs in enumerate(exchange.fingerprints()):
            if not agree(mine, theirs):
                raise MismatchError(
                    f"{self.me} called {Fingerprint.unpack(mine)}, but {self._who(rank)} called "
                    f"{Fingerprint.unpack(theirs)}; "
                    "every rank must call the same collectives in the same order, with equal types and counts"
                )
        if inline is not None:
            inline.finish(exchange)
        self._exchanges.append(exchange)
        if steps is not None:
            yield from steps

    def _new_exchange(self) -> Exchange:
        return Exchange(self._exchange, self._mpi.BYTE, self.inline_bytes)

    def progress(self) -> None:
        """Local. Move outstanding operations forward without waiting."""
        self._check_usable()
        limit = float("inf")
        try:
            for work in self.outstanding:
                work.advance(limit)
                if not work.finished:
                    limit = work.open_stage
                    if limit == 0:
                        break
        except self._mpi.Exception as error:
            raise self._fail(CommunicatorError(f"{self.me}: MPI failed in {work.mine}: {error}")) from error
        except CommunicatorError as error:
            raise self._fail(error) from None
        while self.outstanding and self.outstanding[0].finished:
            self.outstanding.popleft()

    def wait_for(self, work: MpiWork, timeout: float | None) -> None:
        """Wait for `work`, which is one of this queue; see `Work.wait`."""
        timeout = self._settings.timeout if timeout is None else timeout
        start = time.monotonic()
        tell_at = min(self._settings.stall_warning, timeout / 2)
        warn_at = tell_at + min(_ANSWER_SECONDS, timeout / 4)
        told = False  # once: an answer to every answer would never end
        while not work.done():
            waited = time.monotonic() - start
            # MPI moves data only while it is called: a sleep in the middle of a transfer leaves the network idle. Where
            # ranks outnumber cores, yielding gives the core to a rank that has work. A late peer costs no processor.
            if waited < _YIELD_SECONDS:
                os.sched_yield()
                continue
            time.sleep(min(1e-3, waited / 100))
            # A rank that hears of another's wait while it waits itself says so: who is silent is the one to blame.
            if (self._notes.read() or waited > tell_at) and not told:
                told = True
                self._notes.tell_waiting(self.outstanding[0].mine.seq)
            self._check_closed_peers(work)
            self._check_lost_peers(work)
            if waited > warn_at:
                warn_at = float("inf")
                _log.warning("%s", self._waiting_for(work, waited))
            if waited > timeout:
                text = self._waiting_for(work, waited)
                raise self._fail(StalledError(f"{text}; find out what holds them, or raise DISTOPT_TIMEOUT"))

    def _waiting_for(self, work: MpiWork, seconds: float) -> str:
        others = (rank for rank in range(self._topology.world_size) if rank != self._topology.rank)
        absent = [r for r in others if self._notes.waiting.get(r, -1) < self.outstanding[0].mine.seq]
        names = ", ".join(self._who(r) for r in absent) or "slow transfers"
        last = "none was started"
        if self._agreed is not None:
            last = f"the last operation that all have started is {Fingerprint.unpack(self._agreed)}"
        return f"{self.me} has waited {seconds:.1f} s in {work.mine} for {names}; {last}"

    def _check_closed_peers(self, work: MpiWork) -> None:
        for rank, finished in self._notes.closed.items():
            if work.mine.seq >= finished:
                raise self._fail(
                    CommunicatorClosedError(
                        f"{self.me} waits in {work.mine}, but {self._who(rank)} has closed the "
                        "communicator; every rank must call the same collectives before it ends"
                    )
                )

    def _check_lost_peers(self, work: MpiWork) -> None:
        rank = self._peers.lost()
        if rank is not None:
            raise self._fail(
                PeerLostError(f"{self._who(rank)} ended while {self.me} waits in {work.mine}; see that rank's output")
            )

    # -- life cycle --------------------------------------------------------------------------------------------------
    def close(self) -> bool:
        """Local. Leave; idempotent. Whether this was the first call and MPI communicators are idle and can be freed."""
        if self.closed:
            return False
        self.closed = True
        self._peers.close()
        if self._mpi.Is_finalized():
            return False
        finished = self.outstanding[0].mine.seq if self.outstanding else self._next_seq
        self._notes.tell_closed(finished)
        _closed.append((self.outstanding, self._notes))
        if len(_closed) == 1:
            after_closing(_read_farewells)
        idle = not self.outstanding and self._failure is None
        if idle:
            self._exchange.Free()
        return idle

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.closed:
            raise CommunicatorClosedError(f"{self.me} used its communicator after close(); create a new one")

    def _fail(self, error: CommunicatorError) -> CommunicatorError:
        self._failure = error
        return error

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._topology.hosts[rank]} (pid {self._pids[rank]})"

    @property
    def me(self) -> str:
        """This rank in words."""
        return self._who(self._topology.rank)


def _read_farewells() -> None:
    """Take in what peers sent when they closed: UCX warns of messages that nobody has received."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for _, notes in _closed:
        while not notes.all_closed() and time.monotonic() < deadline:
            notes.read()
            time.sleep(1e-4)
