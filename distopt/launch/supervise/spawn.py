"""Start the ranks of a job as child processes, and make sure that they end together.

A rank that fails ends the job: the others get SIGTERM and, after a grace period, SIGKILL.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...checks import check_integer
from ...errors import DistoptError, Preempted, RankFailedError, UsageError
from ..end_together.report import VARIABLE
from ..job.hosts import meet
from ..job.multiprocess import Ticket
from ..job.origin import origin
from ..launchers import LauncherInfo, launcher, launcher_of
from ..processes import (
    ENDING_SIGNALS,
    PREEMPTION_SIGNALS,
    SAVING_SECONDS,
    caught_signals,
    environment,
    print_last,
    print_once,
    waitable_children,
)
from ..rendezvous.meeting import meeting
from ..rendezvous.mpi import is_mpi_job, start_mpi
from ..sockets import handle_events
from ..stopwatch import Stopwatch
from ..threads import cores, thread_variables
from .child import Child, check_call, check_script
from .ranks import LocalRanks, first_of, starting

_END_SECONDS = 2.0  # from SIGTERM to SIGKILL
_FIRST_SECONDS = 0.2  # lead of rank 0 if all ranks are about to print the same
_RANKS_PER_CORE = 32  # more are a mistake


def spawn(fn: Callable[..., object], world_size: int, args: Sequence[Any] = ()) -> None:
    """Run `fn(rank, world_size, *args)` in `world_size` new processes of this host; return when all have ended.

    The children are started with multiprocessing's "spawn" method, so they import the script: it must be a file, and
    call this function under `if __name__ == "__main__":`. `fn` must be a function of a module's or the script's top
    level, and `args` picklable. The children write to this process's stdout and stderr, end when this process
    ends, and share the cores: their BLAS threads are capped unless the user has set a number. Output lines of ranks
    above 0 begin with "[rank 1] " and so on. On SIGINT, `fn` gets a KeyboardInterrupt on every rank, and has 30 s to
    end; a second SIGINT kills the ranks. SIGTERM ends all ranks, as do SIGUSR1 and SIGUSR2 if the script has no handler
    for them. Then the signal has its previous effect (KeyboardInterrupt, end of the process), unless `fn` has returned
    on all ranks. The call waits for ranks that leave by themselves; see `Checkpoint(preemptible=True)`.

    Raises:
        UsageError: `world_size` is not a positive integer, or is more than 32 times the number of cores; `fn` cannot be
            called with these arguments; or they cannot be sent. No rank has been started.
        RankFailedError: a rank raised, exited with a code other than 0, or was killed by a signal. The others have
            been ended.
    """
    try:
        signum = _run(fn, world_size, args)
    except DistoptError as error:
        raise error.with_traceback(None) from None  # the code that starts a rank is not part of the message
    if signum is not None:
        signal.raise_signal(signum)


def main(fn: Callable[..., object], world_size: int | None = None, args: Sequence[Any] = ()) -> None:
    """Run a script's function, and end the process with the proper exit code and message; the last call of a script.

    With `world_size`, this calls `spawn(fn, world_size, args)`; without, `fn(*args)` in this process, which is a rank
    of its launcher's job. If a launcher has already started `world_size` ranks, this process is one of them: it starts
    no others and calls `fn(rank, world_size, *args)`.

    The exit code comes from the first rank that failed. Its traceback is the last output on stderr. A usage error
    prints one line and gives exit code 2. SIGINT and SIGTERM also print one line, and give exit codes 130 and 143. So
    do SIGUSR1 and SIGUSR2. If a signal has queued the job again, the exit code is 0.

    Raises:
        SystemExit: a rank failed, or a signal arrived.
    """
    signum = None
    try:
        info = launcher()
        if world_size is not None and info is not None and info.size > 1:
            args, world_size = _as_rank(info, world_size, args), None
        if world_size is None:
            _meet_others(info)
            check_call(fn, (), args)
            fn(*args)
        else:
            signum = _run(fn, world_size, args)
    except RankFailedError as error:
        print_last(error.details)
        raise SystemExit(error.exit_code) from None
    except DistoptError as error:
        if error.exit_code != UsageError.exit_code:
            raise
        _report(f"error: {error}", launcher())
        sys.exit(UsageError.exit_code)
    except Preempted:
        raise  # not by sys.exit, which would end the other ranks: all leave
    except KeyboardInterrupt:
        info = launcher()
        if info is None or not launcher_of(info).has_agents:
            raise
        sys.stdout.flush()  # the agent reports this once, for all ranks
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except SystemExit as error:
        sys.exit(error.code)  # MPI jobs detect an exit only through this call
    if signum is not None:
        print_last(f"{signal.Signals(signum).name}: all {world_size} ranks have been ended")
        raise SystemExit(128 + signum)


def _meet_others(info: LauncherInfo | None) -> None:
    """Collective. Have the ranks of several hosts meet before the script begins: none waits for one that fails then."""
    if info is None:
        return
    met = meeting(info)
    if is_mpi_job(info):
        start_mpi()
    elif met is not None and not met.one_host:
        meet(info, met)


def _as_rank(info: LauncherInfo, world_size: int, args: Sequence[Any]) -> tuple[Any, ...]:
    if world_size != info.size:
        raise UsageError(
            f"{info.name} has started {info.size} ranks ({info.source}), but the script asks launch.main for "
            f"{world_size!r}; start {world_size!r} ranks, or run the script without a launcher"
        )
    origin.rank_and_size = info.rank, info.size
    return (info.rank, info.size, *args)


def _report(text: str, info: LauncherInfo | None) -> None:
    """Print a failure, unless another rank of this host has just printed the same."""
    if info is None or info.size == 1:
        print_last(text)
        return
    if info.rank > 0:
        time.sleep(_FIRST_SECONDS)  # rank 0 goes first if it reports the same, and may end the job
    print_once(text, text.replace(info.source, ""))  # which has the rank's own numbers


# -- parent ----------------------------------------------------------------------------------------------------------
def _run(fn: Callable[..., object], world_size: int, args: Sequence[Any]) -> int | None:
    """Start, watch and end the ranks; return the signal that ended the job, if any.

    A terminal sends signals to parent and children: ranks that a signal ended have not failed. Nor have those
    that left because of one, which may have been sent to them alone.
    """
    check_script(fn)
    check_call(fn, ("rank", "world_size"), args)
    world_size = check_integer("world_size", world_size, 1)
    if world_size > (limit := _RANKS_PER_CORE * len(cores())):
        raise UsageError(f"world size {world_size} is too large for {len(cores())} cores; pass {limit} at most")
    preempting = [signum for signum in PREEMPTION_SIGNALS if signal.getsignal(signum) is signal.SIG_DFL]
    with (
        waitable_children(),
        caught_signals({*ENDING_SIGNALS, *preempting, signal.SIGQUIT}) as (caught, wake),
        selectors.DefaultSelector() as selector,
    ):
        selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        local = LocalRanks(selector)
        try:
            _start(local, fn, world_size, tuple(args))
            _supervise(local, caught, selector)
        finally:
            local.poll()
            failed = bool(local.failures)  # looked at before this process ends any
            returned = not (failed or local.running)
            local.end(_END_SECONDS)
            left = [rank.exit_code or 0 for rank in local.ranks if rank.left]
            local.close()
    if len(left) == world_size:
        signum = caught[0] if caught else max(left) - 128
        return signum if any(left) else None  # the exit code is 0 if the job will be started again
    if failed:
        first = first_of(local.failures)
        by_signal = first.is_consequence or first.code - 128 in (*caught, signal.SIGTERM)
        if not (caught and by_signal):
            raise RankFailedError(first.rank, first.code, first.text)
    return caught[0] if caught and not returned else None


def _start(local: LocalRanks, fn: Callable[..., object], world_size: int, args: tuple[Any, ...]) -> None:
    variables = {**thread_variables(world_size, os.environ), VARIABLE: f"{os.getpid()} -1"}
    ticket = Ticket()
    # A new process inherits blocked signals, and unblocks them when its handlers are installed. Otherwise Ctrl-C, which
    # a terminal sends to parent and children, could print a traceback per child from the middle of its imports.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        for rank in range(world_size):
            with starting(rank), environment(variables):
                local.add(Child(rank, world_size, fn, args, ticket))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _supervise(local: LocalRanks, caught: list[int], selector: selectors.BaseSelector) -> None:
    """Return when all ranks have ended, one has failed, or a signal has arrived that ends ranks."""
    passed_on = 0
    while local.running and not local.failures:
        handle_events(selector)
        local.poll()
        while passed_on < len(caught):
            signum = caught[passed_on]
            if signum == signal.SIGINT:
                _interrupt(local, caught, selector)
                return
            ends = signum != signal.SIGQUIT  # which asks for flight records
            if ends and (signum not in PREEMPTION_SIGNALS or not all(rank.leaves for rank in local.running)):
                return
            local.signal(signum)
            passed_on += 1


def _interrupt(local: LocalRanks, caught: list[int], selector: selectors.BaseSelector) -> None:
    """Have the ranks end by Ctrl-C; return when they have, when their time is over or, all killed, at the second."""
    local.signal(signal.SIGINT)
    clock = Stopwatch()
    while local.running and clock.seconds() < SAVING_SECONDS:
        handle_events(selector)
        local.poll()
        if caught.count(signal.SIGINT) > 1:
            local.kill()
            return
