"""The key-value client: the one way in which processes of a job give each other bytes while they set up.

A client sets keys, waits for keys of others, and deletes them. An exchange of all ranks (`all_gather`) is a key for
each rank and a wait for all of them, in one request. There are four servers:

- rank 0 of a host, through the Unix socket of a `HostGroup`: it serves while it waits itself;
- the process that rank 0 of a job has started, by TCP: `distopt.launch.end_together.server`;
- for the members of an average of DiLoCo, the service that names them: `distopt.launch.workers.service`;
- PyTorch's store, as trusted as PyTorch's own use of it: `distopt.torch.store_job`.

All but the last admit only processes that know the job's key. A wait ends when all keys are set, when a rank has ended
that was to set one, or after the client's time; then the server says who is missing, with host and process where they
had come.

Under mpiexec, MPI carries only the address of the second server (`distopt.launch.rendezvous.mpi_address`). Exchanges
during training are not made here: each is one collective of a communicator.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from ...errors import LaunchError, Process
from ..end_together.siblings import Absence
from ..keys import ASK, FAILED, FRAME, GIVE_UP, MAX_BYTES, MISSING, VALUES, Missing, Values, Wanted, request, unpack
from ..sockets import close_in_children, in_slices, receive_exactly
from ..stopwatch import SLICE_SECONDS, Deadline
from ..words import ranks_of, waits_for

# Between two looks at the processes of this host. An end counts if seen twice: mpiexec may be ending all ranks.
LOOK_SECONDS = 0.3
_ANSWER_SECONDS = 5.0  # then a server that is asked who is missing does not answer
_SENDER_SECONDS = 0.5  # then a rank that gives up no longer waits for the sender of the reason to end


class KeyValueClient(ABC):
    """One rank's view of the values; one thread at a time may use it.

    Values have at most 16 MiB. All methods that wait raise a LaunchError that names the ranks which did not set their
    keys in time, or ended before.

    Args:
        rank: of this process, as the server knows it.
        ranks: those that `all_gather` connects, in its order; this one is among them.
        seconds: how long a wait lasts.

    Attributes:
        rank: the argument.
        ranks: the argument.
        seconds: the argument.
    """

    def __init__(self, rank: int, ranks: Sequence[int], seconds: float) -> None:
        self.rank, self.ranks, self.seconds = rank, ranks, seconds
        self._size, self._prefix, self.rounds = len(ranks), "", 0

    def set(self, key: str, value: bytes) -> None:
        """Set a key, perhaps again."""
        self._request(key=key, value=value)

    def delete(self, key: str) -> None:
        """Delete a key, if it is set."""
        self._request(deleted=key)

    def get(self, key: str) -> bytes:
        """The value of a key, once any process has set it."""
        (value,) = self._request(wanted=Wanted(self._prefix + key))
        return value

    def gather(self, prefix: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """The values of the keys `prefix` + rank, once each of these ranks (default: `ranks`) has set its own."""
        return self._request(wanted=self._wanted(prefix, ranks))

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective among `ranks`. The payload of every rank, in the order of `ranks`; lengths may differ."""
        if len(self.ranks) == 1:
            return [payload]
        self.rounds += 1
        # All ranks have begun the round before, and so have read what belongs to the one before that.
        deleted = f"{self.rounds - 2}/{self.rank}" if self.rounds > 2 else ""
        prefix = f"{self.rounds}/"
        return self._request(deleted, f"{prefix}{self.rank}", payload, self._wanted(prefix))

    def barrier(self) -> None:
        """Collective among `ranks`. Return when all of them have come."""
        self.all_gather(b"")

    def within(self, prefix: str, ranks: Sequence[int]) -> KeyValueClient:
        """A client of the same connection for some of the ranks, whose keys begin with `prefix`.

        Args:
            prefix: equal on these ranks, and no other client's.
            ranks: as the server knows them, in the order of the new client's `all_gather`.
        """
        made = copy(self)
        made._prefix, made.ranks, made.rounds = f"{self._prefix}{prefix}/", ranks, 0
        return made

    def close(self) -> None:  # noqa: B027
        """Leave, with the last of the clients that share a connection. Idempotent."""

    # For subclasses.
    @abstractmethod
    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes]:
        """Delete a key, set one, and wait for others; each may be absent."""

    def _error(self, missing: Sequence[Missing], wanted: Wanted) -> LaunchError:
        """Why a wait has ended without the values."""
        if ended := [one for one in missing if one.has_ended]:
            return LaunchError(f"{self._names(ended)} ended while the ranks were setting up; see the output")
        waits = self._waits_for(missing, wanted)
        return LaunchError(f"{waits}, for {self.seconds:g} s; see the output of those processes")

    # -- requests --------------------------------------------------------------------------------------------------
    def _wanted(self, prefix: str, ranks: Sequence[int] | None = None) -> Wanted:
        return Wanted(self._prefix + prefix, self.ranks if ranks is None else ranks)

    def _request(
        self, deleted: str = "", key: str = "", value: bytes = b"", wanted: Wanted | None = None
    ) -> list[bytes]:
        if len(value) > MAX_BYTES:
            raise LaunchError(
                f"{len(value)} bytes are too many for the setup of a job; send them through the communicator"
            )
        deleted, key = (self._prefix + each if each else "" for each in (deleted, key))
        return self._exchange(deleted, key, value, wanted)

    def _waits_for(self, missing: Sequence[Missing], wanted: Wanted) -> str:
        whom = self._names(missing) if wanted.ranks else f"the key {wanted.prefix!r}"
        return waits_for(self.rank, whom)

    def _names(self, missing: Sequence[Missing]) -> str:
        names = [Process(one.rank, one.host, one.pid).name for one in missing if one.host]
        if unknown := [one.rank for one in missing if not one.host]:
            names.append(ranks_of(unknown, self._size))
        return ", ".join(names)


class LocalClient(KeyValueClient):
    """The client in the process of the server, which serves the others while this one waits.

    Args:
        rank: see `KeyValueClient`.
        ranks: see `KeyValueClient`.
        seconds: see `KeyValueClient`.
        values: the server's.
        serve: serves for a moment, at once or with a wait for something to do; whether all others have got their
            answers. Raises a TimeoutError after a deadline.
        fail: gives all others a reason to give up.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        values: Values,
        serve: Callable[[Deadline, bool], bool],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(rank, ranks, seconds)
        self._values, self._serve, self._fail = values, serve, fail

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes]:
        answers: list[tuple[int, bytes]] = []
        asked, deadline = request(deleted, key, value, wanted), Deadline(self.seconds)
        self._values.ask(self.rank, asked, lambda kind, content: answers.append((kind, content)))
        if wanted is None:
            return []
        try:
            with contextlib.suppress(TimeoutError):
                while not (self._serve(deadline, not answers) and answers):
                    pass
            self._values.give_up(self.rank)
            kind, content = answers[0]
            if kind == MISSING:
                raise self._error(Missing.all_of(content), wanted)
        except BaseException as error:
            self._values.give_up(self.rank)
            self._fail(str(error))
            raise
        return unpack(content)


def client_alone(seconds: float) -> LocalClient:
    """The client of a job of one rank, which needs no server, and waits in vain for what it has not set."""

    def serve(deadline: Deadline, waits: bool) -> bool:
        time.sleep(min(SLICE_SECONDS, deadline.left()) if waits else 0.0)
        return True

    return LocalClient(0, [0], seconds, Values(), serve, lambda _: None)


class RemoteClient(KeyValueClient):
    """The client of a `distopt.launch.keys.KeyGate` at the other end of a connection.

    Args:
        link: the connection, which it owns.
        rank: see `KeyValueClient`.
        ranks: see `KeyValueClient`.
        seconds: see `KeyValueClient`.
        server: its name in messages.
        patience: seconds that it waits longer, since the server may report who is missing.
        absence: makes what notices processes of this host that end before they come; each wait has its own.
    """

    def __init__(
        self,
        link: socket.socket,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        server: str,
        *,
        patience: float = 0.0,
        absence: Callable[[], Absence] | None = None,
    ) -> None:
        self.link, self._is_open, self._users = link, True, [1]  # how many clients share the connection
        super().__init__(rank, ranks, seconds)
        self._server, self._patience, self._absence = server, patience, absence
        self._lock = threading.Lock()
        close_in_children(link)

    def within(self, prefix: str, ranks: Sequence[int]) -> KeyValueClient:
        """As the base class; the new client shares the connection."""
        self._users[0] += 1
        return super().within(prefix, ranks)

    def close(self) -> None:
        """Leave; the last of the clients that share the connection closes it. Idempotent."""
        self._users[0] -= self._is_open
        self._is_open = False
        if not self._users[0]:
            self.link.close()

    def __del__(self) -> None:  # the script may never close its job
        self.close()

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes]:
        with self._lock:
            try:
                self._send(ASK, request(deleted, key, value, wanted))
                if wanted is None:
                    return []
                kind, content = self._answer(wanted)
                values, missing = (unpack(content), []) if kind == VALUES else ([], Missing.all_of(content))
            except OSError:
                raise LaunchError(f"{self._server} did not answer in time; see its output") from None
            except ValueError:
                raise LaunchError(f"{self._server} cannot be understood; use one version of distopt") from None
        if missing:
            error = self._error(missing, wanted)
            raise self._consequence(error) if any(one.has_ended for one in missing) else error
        return values

    def _answer(self, wanted: Wanted) -> tuple[int, bytes]:
        """Kind and content of the answer to a wait; a warning interrupts and repeats it."""
        deadline = Deadline(self.seconds + self._patience)
        absence = self._absence() if self._absence is not None else None
        answer: tuple[int, bytes] | None = None

        def who() -> str:
            nonlocal answer
            answer = kind, content = self._give_up()
            return self._waits_for(Missing.all_of(content) if kind == MISSING else [], wanted)

        while True:
            try:
                return self._receive(min(LOOK_SECONDS, deadline.left()))  # a Deadline wants to be looked at
            except TimeoutError:
                if deadline.over:
                    return self._give_up()
            if absence is not None:
                # MPI_Finalize is collective: no rank ends well before all have met, however many are left.
                absence.check(who, float("inf"), patience=LOOK_SECONDS / 2)
            if answer is not None and answer[0] == VALUES:
                return answer
            if answer is not None:
                answer = None
                self._send(ASK, request("", "", b"", wanted))

    def _give_up(self) -> tuple[int, bytes]:
        """Do not wait any longer: who is missing, or the values, if they have come after all."""
        self._send(GIVE_UP, b"")
        return self._receive(_ANSWER_SECONDS)

    def _send(self, kind: int, content: bytes) -> None:
        left, deadline = memoryview(FRAME.pack(kind, len(content)) + content), Deadline(self.seconds)
        with contextlib.suppress(ConnectionError):  # if the server has failed, its reason can still be read
            while left:
                left = left[in_slices(self.link, deadline, partial(self.link.send, left)) :]

    def _receive(self, seconds: float) -> tuple[int, bytes]:
        """Kind and content of the next frame.

        Raises:
            TimeoutError: none has begun to come in time.
            LaunchError: the server has ended, or sends a reason to give up.
        """
        try:
            first = in_slices(self.link, Deadline(seconds), partial(self.link.recv, 1))
        except TimeoutError:
            raise
        except OSError:
            first = b""
        try:
            deadline = Deadline(max(self.seconds, _ANSWER_SECONDS))
            kind, length = FRAME.unpack(first and first + receive_exactly(self.link, FRAME.size - 1, deadline))
            content = receive_exactly(self.link, length, deadline)
        except (OSError, struct.error):
            raise LaunchError(f"{self._server} ended while the ranks were setting up; see its output") from None
        if kind == FAILED:
            raise self._consequence(LaunchError(content.decode(errors="replace")))
        return kind, content

    def _consequence(self, error: LaunchError) -> LaunchError:
        """The error as that of a rank that fails because another does, which should be the first to report it."""
        error.is_consequence = True
        if self.link.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                in_slices(self.link, Deadline(_SENDER_SECONDS), partial(self.link.recv, 1))
        return error
