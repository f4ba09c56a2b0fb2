"""The key-value client: the one way in which processes of a job give each other bytes while they set up.

A client sets keys, waits for keys of others, and deletes them. What the ranks of a job exchange (`all_gather`) is a
key for each rank, and a wait for all of them, in one request. There are four servers:

- rank 0 of a host, through the Unix socket of a `HostGroup`: it serves while it waits itself;
- the process that rank 0 has started, by TCP: `distopt.launch.end_together.server`;
- the owner of the endpoint of `distopt run` on several nodes, by TCP: `distopt.launch.nodes.owner`;
- PyTorch's store, as trusted as PyTorch's own use of it: `distopt.torch.store_job`.

The first three are a `distopt.launch.keys.KeyGate`, which admits only processes that know the job's key. A wait ends
when all keys are set, when a rank has ended that was to set one, or after the client's time; then the server knows who
is missing, with host and process where they had come. A wait for the living goes without the values of ranks that have
ended, and so bears members that change.

Under mpiexec, MPI carries only the address of the second server (`distopt.launch.rendezvous.mpi_address`). Exchanges
during training are not made here: each is one collective of a communicator.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial

from ...errors import LaunchError, Process
from ..end_together.siblings import Absence
from ..gate import FOR_KEYS, LONGEST_CALL_SECONDS, RefusedError, call
from ..keys import (
    ASK,
    FAILED,
    FRAME,
    GIVE_UP,
    MAX_BYTES,
    MISSING,
    VALUES,
    Missing,
    Values,
    Wanted,
    frame,
    missing_of,
    pack,
    unpack,
)
from ..launchers import LauncherInfo
from ..launchers.distopt_run import ENDPOINT
from ..sockets import in_slices, receive_exactly
from ..stopwatch import SLICE_SECONDS, Deadline, Stopwatch

# Between two looks at the processes of this host. An end counts if seen twice: mpiexec may be ending all ranks.
LOOK_SECONDS = 0.3
_ANSWER_SECONDS = 5.0  # then a server that is asked who is missing does not answer
_SENDER_SECONDS = 0.5  # then a rank that gives up no longer waits for the sender of the reason to end


class KeyValueClient(ABC):
    """One rank's view of the values; one thread at a time may use it.

    Keys are text without line breaks. Values have at most 16 MiB.

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
        self._size = len(ranks)
        self._prefix = ""
        self._round = 0

    def set(self, key: str, value: bytes) -> None:
        """Local. Set a key, perhaps again.

        Raises:
            LaunchError: the value is too long, or the server has ended.
        """
        self._request(key=key, value=value)

    def get(self, key: str) -> bytes:
        """The value of a key, once any process has set it.

        Raises:
            LaunchError: none has in time, or the server has ended.
        """
        (value,) = self._request(wanted=Wanted(self._prefix + key))
        return value or b""

    def gather(self, prefix: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """The values of the keys `prefix` + rank, once each of these ranks (default: `ranks`) has set its own.

        Raises:
            LaunchError: a rank has not in time, or has ended before; or the server has ended.
        """
        return [value or b"" for value in self._request(wanted=self._wanted(prefix, ranks))]

    def gather_living(self, prefix: str, ranks: Sequence[int] | None = None) -> dict[int, bytes]:
        """As `gather`, without the ranks that have come and ended before they set their keys; by rank.

        Raises:
            LaunchError: a rank that has not ended has not set its key in time; or the server has ended.
        """
        wanted = self._wanted(prefix, ranks, living=True)
        values = zip(wanted.ranks, self._request(wanted=wanted), strict=True)
        return {rank: value for rank, value in values if value is not None}

    def delete(self, key: str) -> None:
        """Local. Delete a key, if it is set."""
        self._request(deleted=key)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective among `ranks`. The payload of every rank, in the order of `ranks`; lengths may differ.

        Raises:
            LaunchError: a rank ended or did not take part in time, or the payload is longer than 16 MiB.
        """
        check_length(payload)
        if len(self.ranks) == 1:
            return [payload]
        self._round += 1
        # All ranks have begun the round before, and so have read what belongs to the one before that.
        deleted = f"{self._round - 2}/{self.rank}" if self._round > 2 else ""
        prefix = f"{self._round}/"
        values = self._request(deleted, f"{prefix}{self.rank}", payload, self._wanted(prefix))
        return [value or b"" for value in values]

    def barrier(self) -> None:
        """Collective among `ranks`. Return when all of them have come; see `all_gather`."""
        self.all_gather(b"")

    def within(self, prefix: str, ranks: Sequence[int]) -> KeyValueClient:
        """Local. A client of the same connection for some of the ranks, whose keys begin with `prefix`.

        Args:
            prefix: equal on these ranks, and no other client's.
            ranks: as the server knows them, in the order of the new client's `all_gather`.
        """
        made = copy(self)
        made._prefix, made.ranks, made._round = f"{self._prefix}{prefix}/", ranks, 0
        return made

    def close(self) -> None:
        """Local. Leave; a wait of others for a key of this rank ends. Idempotent.

        Clients that share a connection leave with the last of them.
        """

    # For subclasses.
    @abstractmethod
    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes | None]:
        """Delete a key, set one, and wait for others; each may be absent.

        Raises:
            LaunchError: of `error`, or because the server has ended.
        """

    def _error(self, missing: Sequence[Missing], wanted: Wanted) -> LaunchError:
        """The reason why a wait has ended without the values."""
        if ended := [one for one in missing if one.has_ended]:
            return LaunchError(f"{self._names(ended)} ended while the ranks were setting up; see the output")
        return LaunchError(
            f"{self._waits_for(missing, wanted)}, for {self.seconds:g} s; see the output of those processes"
        )

    # -- requests --------------------------------------------------------------------------------------------------
    def _wanted(self, prefix: str, ranks: Sequence[int] | None = None, *, living: bool = False) -> Wanted:
        return Wanted(self._prefix + prefix, self.ranks if ranks is None else ranks, living)

    def _request(
        self, deleted: str = "", key: str = "", value: bytes = b"", wanted: Wanted | None = None
    ) -> list[bytes | None]:
        check_length(value)
        deleted, key = (self._prefix + each if each else "" for each in (deleted, key))
        return self._exchange(deleted, key, value, wanted)

    def _waits_for(self, missing: Sequence[Missing], wanted: Wanted) -> str:
        who = f"rank {self.rank} (pid {os.getpid()}) waits in the set-up of the job for "
        return who + (self._names(missing) if wanted.ranks else f"the key {wanted.prefix!r}")

    def _names(self, missing: Sequence[Missing]) -> str:
        known = [Process(one.rank, one.host, one.pid).name for one in missing if one.host]
        unknown = [str(one.rank) for one in missing if not one.host]
        if unknown:
            known.append(f"rank{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} of {self._size}")
        return ", ".join(known)


def check_length(value: bytes) -> None:
    """Local. Raises a LaunchError if it is too long for the set-up of a job."""
    if len(value) > MAX_BYTES:
        raise LaunchError(f"{len(value)} bytes are too many for the setup of a job; send them through the communicator")


class LocalClient(KeyValueClient):
    """The client in the process of the server, which serves the others while this one waits.

    Args:
        rank: see `KeyValueClient`.
        ranks: see `KeyValueClient`.
        seconds: see `KeyValueClient`.
        values: the server's.
        serve: serves for a moment, and returns whether all clients have been sent their answers; takes a deadline.
        fail: gives all other clients a reason to give up.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        values: Values,
        serve: Callable[[Deadline], bool],
        fail: Callable[[str], None],
    ) -> None:
        super().__init__(rank, ranks, seconds)
        self._values, self._serve, self._fail = values, serve, fail
        self._answers: list[tuple[int, bytes]] = []

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes | None]:
        self._answers.clear()
        answers, deadline = self._answers, Deadline(self.seconds)
        request = _request(deleted, key, value, wanted)
        self._values.ask(self.rank, request, lambda kind, content: answers.append((kind, content)))
        if wanted is None:
            return []
        try:
            sent = False
            while not (answers and sent):
                try:
                    sent = self._serve(deadline)
                except TimeoutError:
                    if answers:  # a client does not read its own
                        break
                    self._values.give_up(self.rank)
            kind, content = answers[0]
            if kind != VALUES:
                raise self._error(missing_of(content), wanted)
        except BaseException as error:
            self._values.give_up(self.rank)
            self._fail(str(error))
            raise
        return unpack(content)


def client_alone(seconds: float) -> LocalClient:
    """Local. The client of a job of one rank, which needs no server.

    Args:
        seconds: how long it waits for a key that is not set.
    """

    def serve(deadline: Deadline) -> bool:
        time.sleep(min(SLICE_SECONDS, deadline.left()))
        return True

    return LocalClient(0, [0], seconds, Values(), serve, lambda _: None)


class RemoteClient(KeyValueClient):
    """The client of a `distopt.launch.keys.KeyGate` at the other end of a connection.

    Args:
        link: the connection.
        rank: see `KeyValueClient`.
        ranks: see `KeyValueClient`.
        seconds: see `KeyValueClient`.
        server: its name in messages.
        patience: how much longer to wait if the server may report who is missing.
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
        self._is_open, self._users, self.link = True, [1], link  # how many clients share the connection
        super().__init__(rank, ranks, seconds)
        self.server = server
        self._patience = patience
        self._absence = absence
        self._lock = threading.Lock()

    def within(self, prefix: str, ranks: Sequence[int]) -> KeyValueClient:
        """Local. See `KeyValueClient`."""
        self._users[0] += 1
        return super().within(prefix, ranks)

    def close(self) -> None:
        """Local. See `KeyValueClient`."""
        self._users[0] -= self._is_open
        self._is_open = False
        if not self._users[0]:
            self.link.close()

    def __del__(self) -> None:  # the script may never close its job
        self.close()

    def receive(self, seconds: float) -> tuple[int, bytes]:
        """Local. Kind and content of the next frame.

        Raises:
            TimeoutError: none has begun to come in time.
            LaunchError: the server has ended, or it or another rank has a reason to give up.
        """
        try:
            first = in_slices(self.link, Deadline(seconds), partial(self.link.recv, 1))
        except TimeoutError:
            raise
        except OSError:
            first = b""
        try:
            deadline = Deadline(max(self.seconds, _ANSWER_SECONDS))
            header = first + (receive_exactly(self.link, FRAME.size - 1, deadline) if first else b"")
            kind, length = FRAME.unpack(header)
            content = receive_exactly(self.link, length, deadline) if kind in (VALUES, MISSING, FAILED) else b""
        except (OSError, struct.error) as error:
            raise LaunchError(f"{self.server} ended while the ranks were setting up; see its output") from error
        if kind == FAILED:
            raise self._consequence(LaunchError(content.decode(errors="replace")))
        if kind not in (VALUES, MISSING):
            raise LaunchError("a rank sent a message that cannot be read; use the same version of distopt everywhere")
        return kind, content

    def _exchange(self, deleted: str, key: str, value: bytes, wanted: Wanted | None) -> list[bytes | None]:
        with self._lock:
            # If the server has failed, its reason can still be read.
            with contextlib.suppress(ConnectionError):
                self._send(ASK, _request(deleted, key, value, wanted))
            if wanted is None:
                return []
            try:
                kind, content = self._answer(wanted)
            except TimeoutError:
                raise LaunchError(f"{self.server} did not answer in time; see its output") from None
        try:
            if kind == VALUES:
                return unpack(content)
            missing = missing_of(content)
        except (ValueError, UnicodeDecodeError):
            raise LaunchError(f"{self.server} sent what cannot be read; use the same version everywhere") from None
        error = self._error(missing, wanted)
        raise self._consequence(error) if any(one.has_ended for one in missing) else error

    def _answer(self, wanted: Wanted) -> tuple[int, bytes]:
        """The server's answer to a wait; repeats it as long as a warning interrupts it."""
        deadline = Deadline(self.seconds + self._patience)
        absence = self._absence() if self._absence is not None else None
        answered: list[tuple[int, bytes]] = []

        def who() -> str:
            answered[:] = [self._give_up()]
            kind, content = answered[0]
            return self._waits_for(missing_of(content), wanted) if kind == MISSING else ""

        while True:
            try:
                return self.receive(deadline.left() if absence is None else min(LOOK_SECONDS, deadline.left()))
            except TimeoutError:
                if deadline.over:
                    return self._give_up()
            if absence is not None:
                # MPI_Finalize is collective: no rank ends well before all have met, however many are left.
                absence.check(who, float("inf"), patience=LOOK_SECONDS / 2)
            if answered and answered[0][0] == VALUES:
                return answered[0]
            if answered:
                answered.clear()
                self._send(ASK, _request("", "", b"", wanted))

    def _give_up(self) -> tuple[int, bytes]:
        """Do not wait any longer: who is missing, or the answer, if it has come after all."""
        with contextlib.suppress(ConnectionError):
            self._send(GIVE_UP, b"")
        return self.receive(_ANSWER_SECONDS)

    def _send(self, kind: int, content: bytes) -> None:
        left, deadline = memoryview(frame(kind, content)), Deadline(self.seconds)
        while left:
            left = left[in_slices(self.link, deadline, partial(self.link.send, left)) :]

    def _consequence(self, error: LaunchError) -> LaunchError:
        """The error as that of a rank that fails because another does, which should be the first to report it."""
        error.is_consequence = True
        if self.link.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                in_slices(self.link, Deadline(_SENDER_SECONDS), partial(self.link.recv, 1))
        return error


def _request(deleted: str, key: str, value: bytes, wanted: Wanted | None) -> bytes:
    return pack([deleted.encode(), key.encode(), value, b"" if wanted is None else wanted.to_bytes()])


def client_of_endpoint(info: LauncherInfo, seconds: float, env: Mapping[str, str] | None = None) -> RemoteClient:
    """Local. A client of the owner of the endpoint, in a rank that `distopt run` has started on several nodes.

    The owner keeps values for one attempt: it forgets them when it starts all ranks again.

    Args:
        info: the launcher's view of this process.
        seconds: how long a wait lasts.
        env: the environment (default: that of the process).

    Raises:
        LaunchError: there is no endpoint, or its owner cannot be reached or refuses this rank.
    """
    env = os.environ if env is None else env
    endpoint = env.get(ENDPOINT)
    if endpoint is None:
        raise LaunchError(f"{ENDPOINT} is not set; start the job with distopt run on several nodes, which sets it")
    host, _, port = endpoint.rpartition(":")
    key = bytes.fromhex(env["DISTOPT_JOB_SECRET"])
    try:
        clock = Stopwatch(LONGEST_CALL_SECONDS)
        link = call((host, int(port)), key, FOR_KEYS, info.rank, info.size, clock)
    except (OSError, RefusedError) as error:
        raise LaunchError(
            f"rank {info.rank} of {info.size} on {socket.gethostname()} (pid {os.getpid()}) cannot use the values at "
            f"the endpoint {endpoint} of distopt run: {error}; see the output of the node that owns it"
        ) from None
    return RemoteClient(link, info.rank, range(info.size), seconds, f"the owner of {endpoint}")
