"""Jobs of one host: one Python process has started all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import current_process, parent_process
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from secrets import token_bytes
from typing import Any

from ...checks import check_integer
from ...errors import LaunchError, UsageError
from ...settings import Settings
from ..end_together.parent import end_with_parent
from ..end_together.siblings import Absence
from ..launchers import launcher
from ..processes import abstract_name, children, print_once, stat_of
from ..rendezvous.host_group import HostGroup
from ..sockets import listener_of
from ..threads import cap_threads
from .base import Job
from .origin import origin
from .topology import Topology

UNGUARDED = 'imports the script, which would start processes again; start them under `if __name__ == "__main__":`'

_TICKET_BYTES = 16


def is_importing() -> bool:
    """Whether this is a child of multiprocessing that has yet to import its target."""
    return getattr(current_process(), "_inheriting", False)  # multiprocessing's own flag


def refuse_worker(endpoint: tuple[str, int] | None = None) -> None:
    """Raise if this is a process that a rank has started by multiprocessing, which has inherited its variables.

    Args:
        endpoint: host and port where PyTorch's ranks meet. If it is not the launcher's, the process has named a place,
            a rank and a number of ranks of its own, and is refused only while it imports the script.

    Raises:
        LaunchError: it is one.
    """
    if parent_process() is None and not is_importing():
        return
    parent = _parent()
    variables = _variables_of(parent)
    rank = _rank_by(variables, endpoint)
    if rank is None and not is_importing():
        return
    where = f"process {parent}" if rank is None else f"rank {rank}"
    fact = f"{current_process().name} (pid {os.getpid()}) was started by multiprocessing in {where}, and is not a rank"
    cure = 'put the call under `if __name__ == "__main__":`' if is_importing() else "let the rank itself join the job"
    if is_importing():  # if the parent has ended, another child of it has been refused before
        sys.excepthook = partial(_print_refusal, f"{fact}; {cure}") if variables else lambda *_: None
    raise LaunchError(f"{fact}; {cure}")


def _parent() -> int:
    """The process that started this one by multiprocessing."""
    parent, pid = parent_process(), os.getppid()
    if parent is not None and parent.pid:
        return parent.pid
    if current_process().name.startswith("ForkServer"):  # the parent of a process that imports is the server
        return int(stat_of(pid)[1])
    return pid


def _variables_of(pid: int) -> dict[str, str]:
    """The variables of a process at its start; none if it has ended."""
    with contextlib.suppress(OSError):
        pairs = (os.fsdecode(pair).partition("=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return {name: value for name, _, value in pairs if name}
    return {}


def _rank_by(variables: dict[str, str], endpoint: tuple[str, int] | None) -> int | None:
    """The rank of the process with these variables, if this one has the same, and no other endpoint."""
    place = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if endpoint is not None and (endpoint[0], str(endpoint[1])) != place:
        return None
    with contextlib.suppress(LaunchError):  # they contradict each other
        theirs = launcher(variables)
        if theirs is not None and theirs.size > 1 and theirs == launcher():
            return theirs.rank
    return None


def _print_refusal(text: str, *_: object) -> None:
    """An excepthook of a child that was refused: one line for all of them, in place of multiprocessing's tracebacks."""
    # `multiprocessing.Pool` would start others forever.
    if print_once(text, "refusal") and "PoolWorker" in current_process().name:
        with contextlib.suppress(OSError):  # the rank has ended
            os.kill(_parent(), signal.SIGTERM)


def _new_secret() -> bytes:
    secret = token_bytes(_TICKET_BYTES)
    origin.tickets[secret] = os.getpid()
    if is_importing():  # a script without guard will start processes next
        sys.excepthook = partial(_print_missing_guard, sys.excepthook)
    return secret


def _print_missing_guard(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """An excepthook. One line for a missing guard, where multiprocessing would print 40 in every child."""
    if kind is not RuntimeError or "bootstrapping phase" not in str(error):
        before(kind, error, trace)
    else:
        print_once(f"{current_process().name} (pid {os.getpid()}) {UNGUARDED}", UNGUARDED)


@dataclass(frozen=True)
class Ticket:
    """16 secret bytes known only to the processes of one job.

    The parent makes a ticket and passes it to every child, by pickling or inheritance. It names and authenticates the
    socket through which the ranks meet. `repr` does not show it, to keep it out of logs.

    Attributes:
        secret: the 16 bytes.
        handed_out: number of processes that have the ticket: this one, and those that multiprocessing has sent it to.
    """

    secret: bytes = field(default_factory=_new_secret, repr=False)
    handed_out: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != _TICKET_BYTES:
            raise UsageError(f"a ticket is {_TICKET_BYTES} bytes; make one with Ticket()")

    def __reduce__(self) -> tuple[type[Ticket], tuple[bytes, int]]:
        if get_spawning_popen() is not None:
            object.__setattr__(self, "handed_out", self.handed_out + 1)
        return Ticket, (self.secret, self.handed_out)


class MultiprocessJob(Job):
    """One rank of a job whose processes all run on this host; rank and local rank are equal.

    Works in processes started by `distopt.launch.spawn` and in those that a script starts with
    `multiprocessing.Process`.

    Args:
        ticket: the job's ticket, the same object or a pickled copy on every rank.
        local_rank: rank of this process, 0 ... world_size - 1; unique.
        world_size: number of processes.

    Raises:
        LaunchError: the other ranks have another ticket, or `local_rank` is not one of `world_size` ranks.
        UsageError: a number is not an integer.
    """

    def __init__(self, ticket: Ticket, local_rank: int, world_size: int) -> None:
        if not isinstance(ticket, Ticket):
            raise LaunchError(f"the ticket is a {type(ticket).__name__}; make one Ticket() and pass it to every rank")
        world_size, local_rank = check_integer("world_size", world_size, 1), check_integer("local_rank", local_rank)
        if not 0 <= local_rank < world_size:
            raise LaunchError(
                f"local_rank={local_rank} is outside 0 ... {world_size - 1}; number the {world_size} processes from 0"
            )
        if world_size > 1 and _is_unshared(ticket):
            raise LaunchError(
                f"rank {local_rank} has made its ticket itself, so no other rank has it; make one in the process that "
                f"starts the {world_size} ranks, and pass it to each of them as an argument"
            )
        self.topology = Topology.of_one_host(local_rank, world_size, socket.gethostname())
        self._ticket = ticket
        self._settle()

    def _settle(self) -> None:
        cap_threads(self.topology.world_size)
        end_with_parent()

    def _make_host_group(self) -> HostGroup:
        rank, size = self.topology.rank, self.topology.world_size
        settings = Settings.from_env()
        absence = Absence(settings.stall_warning, all_started=self._ticket.handed_out >= size)
        with _sole(self._ticket, rank) if size > 1 else contextlib.nullcontext():
            return HostGroup(self._ticket.secret, rank, size, settings.timeout, absence)


@contextlib.contextmanager
def _sole(ticket: Ticket, rank: int) -> Iterator[None]:
    """Hold a name that only one process at a time can have. Without it, two ranks 1 would wait for rank 0."""
    name = abstract_name(b"distopt rank %d " % rank + ticket.secret)
    with socket.socket(socket.AF_UNIX) as holder:
        try:
            holder.bind(name)
            holder.listen()
        except OSError:  # another user may have taken it, and only this check is lost
            if listener_of(name) == os.geteuid():
                raise LaunchError(
                    f"another process joins as rank {rank} with the same ticket; number the processes of a job 0, 1, "
                    "..., and make a ticket for each job"
                ) from None
        yield


def _is_unshared(ticket: Ticket) -> bool:
    """Whether this process, a child of multiprocessing, made the ticket and cannot have passed it on."""
    own = origin.tickets.get(ticket.secret) == os.getpid() and not ticket.handed_out
    return own and parent_process() is not None and not children(os.getpid())
