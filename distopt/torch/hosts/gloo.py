"""Transfers of bytes between two ranks on different hosts, through PyTorch's own Gloo.

A rank that fails sends the reason to all others before it closes its connections, so that all errors name the same
cause.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ... import errors
from ...comm.work import MessageWork
from ...errors import (
    CommunicatorClosedError,
    CommunicatorError,
    LaunchError,
    PeerLostError,
    Process,
    StalledError,
    UsageError,
)
from ..private import gloo_options, source_of, unrecorded
from ..tensors import array_of, bytes_of

if TYPE_CHECKING:
    from ...comm.base import Array

# Gloo's tags have 31 bits. The tag of a message contains the caller's tag and a hash of type and count, so that a
# receive of another type or count does not match, except for one pair in 1,024. Gloo itself compares no types, accepts
# a shorter message, and ends the process if a message is longer than its receive.
_MESSAGE = 1 << 30
_TAG_BITS, _HASH_BITS = 20, 10
_NEVER_TAG = (1 << 30) - 1  # no message has this tag
_CAUSE_BYTES = 4096
_CAUSE_SECONDS = 1.0  # then a rank that fails raises its own error, if no rank has reported the cause
_NAP_SECONDS = 0.01  # between two looks for a reported cause


class Transfer(NamedTuple):
    """A transfer that has been started.

    Attributes:
        work: PyTorch's work.
        peer: rank at the other end; None: any rank.
    """

    work: Any
    peer: int | None


class Gloo:
    """The transfers of one rank to and from the others.

    After a wait that timed out or lost its peer, the connections are unusable: call `fail`.

    Args:
        store: the ranks exchange their addresses through it.
        rank: of this process among `processes`.
        processes: all ranks.
        address: other hosts reach this one by it; not used if there is an interface.
        interface: the network interface in `GLOO_SOCKET_IFNAME`, or empty.
        seconds: how long the ranks wait for each other here.

    Raises:
        LaunchError: Gloo cannot connect the ranks.
    """

    def __init__(
        self, store: dist.Store, rank: int, processes: Sequence[Process], address: str, interface: str, seconds: float
    ) -> None:
        self.processes = processes
        self.me = processes[rank]
        self._rank = rank
        try:
            options = gloo_options(seconds, **({"interface": interface} if interface else {"hostname": address}))
            # A wait that times out closes all connections of its group, so notices have one of their own. Collectives
            # have two, so that data go one way in each connection: while a thread writes to a connection, Gloo's
            # thread cannot read from it, and keeps a core busy by trying.
            self._group, self._back, self._notices = [
                dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, len(processes), options)
                for name in ("data", "back", "notices")
            ]
        except RuntimeError as error:
            place = f"interface {interface}" if interface else f"address {address}"
            raise LaunchError(
                f"{self.me.name} has not met the other ranks through Gloo by its {place} ({error}); let all TCP ports "
                "pass between the hosts, or name a network interface that reaches them in GLOO_SOCKET_IFNAME"
            ) from error
        self._keeps = self._notices  # keeps connections open, so that other ranks can report a cause
        self._causes = [torch.zeros(_CAUSE_BYTES, dtype=torch.uint8, device="cpu") for _ in processes]
        self._received: list[Any] = []
        self._waiting = 0  # number of threads in `wait`
        for other in range(len(processes)):
            if other != rank:
                with suppress(RuntimeError):  # it has left already
                    self._received.append(unrecorded(self._notices.recv, [self._causes[other]], other, 0))

    def send(self, data: torch.Tensor, to: int, tag: int, what: Callable[[], str]) -> Transfer:
        """Local. Start to send to rank `to`, which must receive at least as many bytes."""
        try:
            return Transfer(unrecorded(self._way(to, tag, sends=True).send, [data], to, tag), to)
        except RuntimeError as error:
            raise self._lost(to, what()) from error

    def receive(self, data: torch.Tensor, source: int | None, tag: int, what: Callable[[], str]) -> Transfer:
        """Local. Start to receive from a rank; None: from any. The message may be shorter."""
        group = self._open()
        try:
            if source is None:
                work = unrecorded(group.recv_anysource, [data], tag)
            else:
                work = unrecorded(self._way(source, tag, sends=False).recv, [data], source, tag)
        except RuntimeError as error:
            raise self._lost(source, what()) from error
        return Transfer(work, source)

    def wait(self, transfer: Transfer, deadline: float, what: Callable[[], str]) -> None:
        """Wait for the end of a transfer.

        Args:
            transfer: the transfer.
            deadline: on the clock of `time.monotonic`.
            what: returns a description of the operation for errors.

        Raises:
            PeerLostError: the connection is broken. The rank at its other end need not be the cause.
            StalledError: the other rank was late.
        """
        self._waiting += 1
        try:
            transfer.work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            if time.monotonic() < deadline:
                raise self._lost(transfer.peer, what()) from error
            peer, ranks = self._named(transfer.peer)
            cure = "find out what it is busy with, or raise DISTOPT_TIMEOUT"
            fact = f"{self.me.name} waits in {what()} for {peer}, which did not come in time"
            raise StalledError(fact, cure=cure, ranks=ranks) from error
        finally:
            self._waiting -= 1

    def message(self, sends: bool, array: Array, dtype: str, peer: int | None, tag: int, seconds: float) -> GlooMessage:
        """Local. Start a message, independent of the collectives; see `Communicator.send`."""
        most = (1 << _TAG_BITS) - 1
        if not 0 <= tag <= most:
            raise UsageError(f"tag {tag} is out of range between hosts; choose one from 0 to {most:,}")
        content = zlib.crc32(f"{array.size} {dtype}".encode()) % (1 << _HASH_BITS)
        wide = _MESSAGE | tag << _HASH_BITS | content
        start: Any = self.send if sends else self.receive
        text = (
            f"{'send' if sends else 'receive'} of a message of {array.size:,} {dtype} with tag {tag} "
            "(both sides must agree on tag, type and count)"
        )
        return GlooMessage(self, start(torch.from_numpy(bytes_of(array)), peer, wide, lambda: text), text, seconds)

    def fail(self, error: CommunicatorError, *, is_known: bool = False) -> CommunicatorError:
        """Local. Report an error to all other ranks, close the connections, and return the cause.

        If the error names a rank that has failed itself, and has reported why, its error is nearer to the cause, and so
        on.

        Args:
            error: the error of this rank.
            is_known: whether it is the cause for certain.
        """
        self._say(error)
        cause, passed, deadline = error, {self.me.rank}, time.monotonic() + _CAUSE_SECONDS
        while not is_known and (cause.is_consequence or isinstance(cause, StalledError)):
            named = cause.ranks[0].rank if cause.ranks else self.me.rank
            heard = None if named in passed else self._heard(named)
            if heard is not None:
                passed.add(named)
                cause = heard
            elif named in passed or time.monotonic() > deadline:
                break
            else:
                time.sleep(_NAP_SECONDS)
        self._break()
        return cause

    def close(self) -> None:
        """Local. Close the connections; idempotent. A thread in `wait` gets an error."""
        if self._waiting:
            self._break()
        else:
            self._forget()

    def _forget(self) -> None:
        """Drop the groups. Their connections close when no work holds them any more."""
        self._group = self._back = self._notices = self._keeps = None
        self._received = []

    def _break(self) -> None:
        """Close the connections even if works hold them, so that no other rank waits for this one."""
        groups = [group for group in (self._group, self._back) if group is not None]
        self._forget()
        for group, (other, process) in itertools.product(groups, enumerate(self.processes)):
            if process is not self.me:
                with suppress(RuntimeError):  # a wait that times out closes all connections of the group
                    group.recv([torch.empty(1, device="cpu")], other, _NEVER_TAG).wait(timedelta(milliseconds=1))

    def _say(self, error: CommunicatorError) -> None:
        """Report an error to all other ranks, the first time."""
        notices, self._notices = self._notices, None
        text = json.dumps([type(error).__name__, error.fact[: _CAUSE_BYTES // 2], error.cure, error.ranks])
        data = torch.frombuffer(bytearray(text.encode()[:_CAUSE_BYTES]), dtype=torch.uint8)
        sends = []
        for rank, process in enumerate(self.processes):
            if process is not self.me and notices is not None:
                with suppress(RuntimeError):  # it has ended
                    sends.append(notices.send([data], rank, 0))
        for send in sends:  # all are on their way: a wait that times out, for a rank that has failed too, ends the rest
            with suppress(RuntimeError):
                send.wait(timedelta(seconds=_CAUSE_SECONDS))

    def _heard(self, number: int) -> CommunicatorError | None:
        """The error that the rank with this number in the job has reported; None if it has not."""
        for process, said in zip(self.processes, self._causes, strict=True):
            if process.rank == number:
                with suppress(ValueError):  # it has reported nothing, or more than fits
                    kind, fact, cure, ranks = json.loads(array_of(said).tobytes().rstrip(b"\0"))
                    error: CommunicatorError = getattr(errors, kind)(
                        fact, cure=cure, ranks=[Process(*one) for one in ranks]
                    )
                    return error
        return None

    def _way(self, peer: int, tag: int, *, sends: bool) -> Any:
        """The group of a transfer: that which collectives have for data to lower ranks, or that for all other data."""
        group = self._open()
        return self._back if (peer < self._rank) is sends and tag < _MESSAGE else group

    def _open(self) -> Any:
        if self._group is None:
            raise CommunicatorClosedError(f"{self.me.name} has closed its connections", cure="make a new group")
        return self._group

    def _lost(self, rank: int | None, what: str) -> PeerLostError:
        peer, ranks = self._named(rank)
        fact = f"{peer} ended or cannot be reached while {self.me.name} is in {what}"
        return PeerLostError(fact, cure="see its output", ranks=ranks)

    def _named(self, rank: int | None) -> tuple[str, list[Process]]:
        processes = [] if rank is None else [self.processes[rank]]
        return processes[0].name if processes else "any rank", processes


class GlooMessage(MessageWork):
    """A message that has been started. Gloo moves it in a thread of its own, and reports the end to `wait` only."""

    def __init__(self, gloo: Gloo, transfer: Transfer, what: str, seconds: float) -> None:
        self._gloo = gloo
        self._transfer = transfer
        self._what = what
        self._seconds = seconds
        self._ended = False
        self._lock = threading.Lock()  # Gloo wakes only one waiter

    @property
    def source(self) -> int:
        """Local. See `MessageWork.source`."""
        if not self._ended:
            return -1
        peer = self._transfer.peer
        return source_of(self._transfer.work) if peer is None else peer

    def done(self) -> bool:
        """Local. Whether `wait` has returned."""
        return self._ended

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; see `Work.wait`."""
        deadline = time.monotonic() + (self._seconds if timeout is None else timeout)
        with self._lock:
            if self._ended:
                return
            try:
                self._gloo.wait(self._transfer, deadline, lambda: self._what)
            except CommunicatorError as error:
                raise self._gloo.fail(error) from error
            self._ended = True
