"""How processes of a job end, and how their parent notices: the common part of `spawn` and `distopt run`."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from ..errors import UsageError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals that `distopt run` passes on to what it has started.
PASSED_ON_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
# Signals that schedulers send before they end a job: by themselves, or because a job script or submitit asks for it.
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAVING_SECONDS = 30.0  # then ranks that save their states after a signal are killed
_SAID_SECONDS = 2.0  # then a process that prints the same line prints it again
# Options of `prctl`, of linux/prctl.h.
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)


def describe_exit(exit_code: int) -> tuple[int, str]:
    """The exit code that a shell would see, and a clause that says how the process ended.

    Args:
        exit_code: as in `multiprocessing` and `subprocess`: -n if signal n ended the process.
    """
    if exit_code >= 0:
        return exit_code, f"left with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = "; SIGKILL is what the kernel sends when memory runs out" if -exit_code == signal.SIGKILL else ""
    return 128 - exit_code, f"was ended by {name}{hint}"


def exit_status(code: object) -> int:
    """The exit status of a process that calls `sys.exit(code)`; 256, which `os.system` may return, gives 0."""
    if isinstance(code, int):
        return code & 0xFF if abs(code) <= sys.maxsize else 0xFF
    return int(code is not None)


def abstract_name(text: bytes) -> str:
    """The abstract name of a Unix socket for `text`, which cannot be read off it. One process at a time can have it."""
    return f"\0distopt-{hashlib.sha256(text).hexdigest()[:32]}"


def print_once(text: str, subject: str = "") -> bool:
    """Print a line on stderr, unless a process with the same parent has just printed one on this subject.

    Args:
        text: the line.
        subject: what it is about (default: the line itself).

    Returns:
        Whether this process has printed it; it then stays for a while, for others that are slower.
    """
    same = f"distopt {os.getuid()} {os.getppid()} {subject or text}"
    with socket.socket(socket.AF_UNIX) as said:
        try:
            said.bind(abstract_name(same.encode()))
        except OSError:
            return False
        print_last(text)
        time.sleep(_SAID_SECONDS)
    return True


def print_last(text: str) -> None:
    """Print on stderr, after all that this process has printed on stdout."""
    sys.stdout.flush()
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def caught_signals(signals: Iterable[int], *, last: bool = False) -> Iterator[tuple[list[int], int]]:
    """Catch signals: yield a list that receives them, and a descriptor that then becomes readable.

    With `last`, the body is the last act of this process, and signals have no effect after it.
    """
    caught: list[int] = []
    wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def catch(signum: int, _: FrameType | None) -> None:
        caught.append(signum)
        with contextlib.suppress(BlockingIOError):  # full, and so readable
            os.write(write, b"!")

    # Python runs signal handlers in the main thread only; in other threads, the existing handlers stay.
    chosen = tuple(signals) if threading.current_thread() is threading.main_thread() else ()
    before = {signum: signal.signal(signum, catch) for signum in chosen}
    try:
        yield caught, wake
    finally:
        for signum, handler in before.items():
            ignore(signum) if last else signal.signal(signum, handler)
        os.close(wake)
        os.close(write)


def ignore(signum: int) -> None:
    """Let a signal have no effect from now on, not even a traceback if it comes at this moment."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    signal.signal(signum, signal.SIG_IGN)
    sys.unraisablehook = hook


@contextlib.contextmanager
def waitable_children() -> Iterator[None]:
    """In the block, children keep their exit codes until they are asked for, also if SIGCHLD was ignored.

    A process inherits an ignored SIGCHLD. The kernel then forgets children at their ends, and multiprocessing believes
    that they run forever.

    Raises:
        UsageError: it is ignored, and this is not the main thread, which alone can change that.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:
        raise UsageError("SIGCHLD is ignored, so no end of a rank is seen; start ranks in the main thread") from None
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of this process; raises an OSError if the kernel refuses."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def end_of(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None on a kernel before 5.3, or in a sandbox."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended; /dev/null is always readable
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, from the state and the parent on.

    Raises:
        OSError: the process has ended.
    """
    # The name is any text in brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """Process ids of the children of process `pid`, as far as they can be seen."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # the parent has ended, or belongs to another user
        return []


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while, which processes that are started then inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
