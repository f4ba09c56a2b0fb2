"""The kinds of fault: what a rank does, in `job.py`, and what must come of it, in `trials.py`."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from .job import Rank

COUNT = 50_000  # elements of arrays in which ranks differ
CODE = 3
# Where a fault comes: before MPI_Init; before the ranks have met; between two steps; in a collective.
LAUNCH, START, BETWEEN, INSIDE = PLACES = ("launch", "start", "between", "inside")
# Required outcome: the job fails and names the rank; it fails; it continues; it may do either, but not fail silently.
NAMED, ENDED, GOES_ON, MAY_GO_ON = "fails, names the rank", "fails", "goes on", "goes on, or fails and names the rank"


class LeftError(Exception):
    """The rank returns from its function."""


class Kind(NamedTuple):
    """One kind of fault.

    Attributes:
        harm: what the faulty rank calls; with `together`, all call it, with whether they are the faulty one.
        end: what must come of it.
        places: where it may come.
        says: a regular expression that the job's output must match.
        waits: whether nothing but the time-out can end the job.
        inline: whether only the thread that calls collectives can do it.
        together: whether all ranks take part.
        silent: whether the rank dies without a word, and of a cause that launchers know.
        leaves: whether its exit code is 0, which no launcher takes for a failure.
        code: exit code that the job must have, if the launcher tells that of a rank.
        last: whether only the last rank can do it.
        ways: regular expression for the names of the ways that have it.
    """

    harm: Callable[..., None]
    end: str = NAMED
    places: tuple[str, ...] = (START, BETWEEN, INSIDE)
    says: str = ""
    waits: bool = False
    inline: bool = False
    together: bool = False
    silent: bool = False
    leaves: bool = False
    code: int | None = None
    last: bool = False
    ways: str = ""


# -- a rank ends -------------------------------------------------------------------------------------------------------
def die_by(signum: signal.Signals) -> Kind:
    return Kind(lambda rank: os.kill(os.getpid(), signum), places=PLACES, silent=True)


def exit_of_c(rank: Rank) -> None:
    ctypes.CDLL(None).exit(0)


def leave(rank: Rank) -> None:
    raise LeftError


def raises(error: Callable[[], BaseException], says: str) -> Kind:
    def fail(rank: Rank) -> None:
        raise error()

    return Kind(fail, says=says, inline=True)


def raise_in_thread(rank: Rank) -> None:
    """As a script whose training is a thread that fails: the main thread then has no more to do."""

    def fail() -> None:
        raise ValueError("the cause")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise LeftError


def limit_memory(rank: Rank, faulty: bool) -> None:
    if faulty:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
    rank.communicator.empty(16 << 20)


ENDS = {
    **{name: die_by(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGHUP", "SIGBUS")},
    "os._exit 3": Kind(lambda rank: os._exit(CODE), places=PLACES, silent=True, code=CODE),
    "os._exit 0": Kind(lambda rank: os._exit(0), leaves=True),
    "exit(0) of C": Kind(exit_of_c, leaves=True),
    "sys.exit 3": Kind(lambda rank: sys.exit(CODE), inline=True, code=CODE),
    "return": Kind(leave, inline=True, leaves=True),
    "exception": raises(lambda: ValueError("the cause"), "ValueError: the cause"),
    "MemoryError": raises(MemoryError, "MemoryError"),
    "KeyboardInterrupt": raises(KeyboardInterrupt, "KeyboardInterrupt|SIGINT|[Ii]nterrupt"),
    "huge text": raises(lambda: ValueError("x" * 50_000_000), "ValueError: xxx"),
    "text not UTF-8": raises(lambda: ValueError("\udcff\ud800 cause"), " cause"),
    "exception in a thread": Kind(raise_in_thread, inline=True, leaves=True, says="ValueError: the cause"),
    "out of memory": Kind(limit_memory, places=(BETWEEN, INSIDE), inline=True, together=True),
}


# -- a rank is late ----------------------------------------------------------------------------------------------------
def spin(rank: Rank) -> None:
    while not rank.may_go_on():
        pass


def sleep(rank: Rank) -> None:
    while not rank.may_go_on():
        time.sleep(0.05)


def hold_interpreter(rank: Rank) -> None:
    """Sleep in C without letting other threads of Python run."""
    while not rank.may_go_on():
        ctypes.PyDLL(None).sleep(1)


def stop(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def late(harm: Callable[..., None], *, inline: bool = True) -> Kind:
    return Kind(harm, waits=True, inline=inline)


STALLS = {
    "SIGSTOP": late(stop, inline=False)._replace(places=PLACES),
    "endless loop": late(spin),
    "sleep": late(sleep),
    "interpreter held": late(hold_interpreter),
    "pause": Kind(stop, GOES_ON),
    "whole job suspended": Kind(lambda rank: None, GOES_ON, (BETWEEN, INSIDE)),
    "missing at the meeting": late(sleep)._replace(places=(START,)),
}


# -- a rank does something else ----------------------------------------------------------------------------------------
def reduces_other(count: int = COUNT, dtype: type = np.float32) -> Callable[[Rank, bool], None]:
    def reduce(rank: Rank, faulty: bool) -> None:
        array = np.zeros(count, dtype) if faulty else np.zeros(COUNT, np.float32)
        rank.communicator.all_reduce(array, label="sums").wait()

    return reduce


def other_operation(rank: Rank, faulty: bool) -> None:
    array = np.zeros(COUNT, np.float32)
    communicator = rank.communicator
    (communicator.broadcast if faulty else communicator.all_reduce)(array, label="sums").wait()


def other_root(rank: Rank, faulty: bool) -> None:
    rank.communicator.broadcast(np.zeros(COUNT, np.float32), root=int(faulty)).wait()


def other_order(rank: Rank, faulty: bool, labels: tuple[str, ...]) -> None:
    """Reductions that differ in nothing but their labels."""
    for label in labels if faulty else ("first", "second", "third"):
        rank.communicator.all_reduce(np.zeros(COUNT, np.float32), label=label).wait()


def limit_files(rank: Rank, faulty: bool) -> None:
    """As if the file system behind shared memory were full."""
    if faulty:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    rank.communicator.empty(1 << 20)


def call_from_two_threads(rank: Rank, faulty: bool) -> None:
    """A thread is refused, or both calls are accepted and the rank is one collective ahead."""
    barrier = rank.communicator.barrier
    if faulty:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(barrier)
            time.sleep(0.3)
            try:
                barrier()
            finally:
                other.result()
    else:
        time.sleep(0.6)  # the faulty rank waits for this one
        barrier()
    rank.communicator.all_reduce(np.zeros(COUNT, np.float32)).wait()


def close(rank: Rank) -> None:
    rank.communicator.close()
    rank.communicator.barrier()


def mistake(harm: Callable[..., None], says: str, **options) -> Kind:
    return Kind(harm, **{"places": (BETWEEN, INSIDE), "says": says, "inline": True, "together": True, **options})


MISTAKES = {
    "count": mistake(reduces_other(count=COUNT + 1), "MismatchError"),
    "type": mistake(reduces_other(dtype=np.int32), "MismatchError"),
    "operation": mistake(other_operation, "MismatchError"),
    "root": mistake(other_root, "MismatchError"),
    "skipped collective": mistake(functools.partial(other_order, labels=("first", "third")), "MismatchError"),
    "other order": mistake(functools.partial(other_order, labels=("second", "first", "third")), "MismatchError"),
    # MPI needs no shared memory of ours. The ranks extend one file; the last one's part is the end of it.
    "shared memory full": mistake(limit_files, "WireMemoryError", last=True, ways="^main|^raw|^run|shm|hier"),
    "second thread": mistake(call_from_two_threads, "two threads|MismatchError"),
    "closed communicator": Kind(close, places=(BETWEEN, INSIDE), inline=True, says="closed|after close"),
}


# -- the launcher, the host --------------------------------------------------------------------------------------------
def leave_unseen(rank: Rank) -> None:
    """As if mpiexec missed that this process has ended."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(CODE)


def wait_for_harm(rank: Rank) -> None:
    """The harm comes from outside: `instruments.faults.trials` has read of it. Returns a second after the parent's end.

    A rank at "start" has not called distopt yet, which ends with its parent only from then on. Others are ended then,
    but might finish first if they resumed at once.
    """
    parent, deadline = os.getppid(), time.monotonic() + 60.0
    if threading.current_thread() is threading.main_thread():
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)


ONE_HOST = "^(main|raw|mpiexec|run)"
LAUNCHERS = {
    # No recipient is left.
    "parent killed": Kind(wait_for_harm, ENDED, ways=f"{ONE_HOST}|hosts (mpi|hier)"),
    "interrupt": Kind(wait_for_harm, ENDED, says="KeyboardInterrupt|SIGINT|Ctrl-C", ways=ONE_HOST),
    "terminated": Kind(wait_for_harm, ENDED, ways=f"{ONE_HOST}|hosts (mpi|hier|run)"),
    "unseen by mpiexec": Kind(leave_unseen, ENDED, PLACES, ways="^mpiexec"),
    "link down": Kind(wait_for_harm, NAMED, (INSIDE,), ways="hosts"),
    "packets lost": Kind(wait_for_harm, NAMED, (INSIDE,), ways="hosts"),
    "short outage": Kind(wait_for_harm, MAY_GO_ON, (INSIDE,), ways="hosts run"),
}
LINKS = ("link down", "packets lost")


# -- what a process inherits and starts --------------------------------------------------------------------------------
def fork(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        raise LeftError
    os.waitpid(child, 0)


def nothing(rank: Rank) -> None:
    pass


SETTINGS = {
    "forked child exits": Kind(fork, GOES_ON, (BETWEEN, INSIDE), inline=True),
    "fork before the meeting": Kind(fork, GOES_ON, (START,), inline=True),
    "SIGCHLD ignored": Kind(nothing, GOES_ON, (START,), ways="^(?!raw)"),  # which multiprocessing does not bear
    "stdout closed": Kind(nothing, GOES_ON, (START,)),
}

KINDS: dict[str, Kind] = {**ENDS, **STALLS, **MISTAKES, **LAUNCHERS, **SETTINGS}
