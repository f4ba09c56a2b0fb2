"""The processes that `spawn` starts: as its ranks, around the script's function, and as it supervises them.

Mistakes in a script, and in a function and arguments for ranks, are found before, and reported in one line each.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from ...errors import DistoptError, Preempted, UsageError
from ...recorder.flight import flight_record
from ..end_together.report import supervisor
from ..job.multiprocess import UNGUARDED, Ticket, is_importing
from ..job.origin import origin
from ..processes import ENDING_SIGNALS, describe_exit, die_with, exit_status, ignore
from .output import mark_output
from .ranks import Rank

_NO_GUARD = os.EX_USAGE  # the exit code of a rank whose script starts ranks when it is imported


class Child(Rank):
    """A process that runs `fn(rank, world_size, *args)`.

    Raises:
        UsageError: the function or the arguments cannot be sent to it.
    """

    fails_by_report = True

    def __init__(
        self, rank: int, world_size: int, fn: Callable[..., object], args: tuple[Any, ...], ticket: Ticket
    ) -> None:
        super().__init__(rank)
        words = (_Announced(self.sink), fn, (rank, world_size, *args), ticket, os.getpid())
        try:
            self._process: SpawnProcess = multiprocessing.get_context("spawn").Process(
                target=_run_rank, args=words, name=f"rank {rank}"
            )
            self._process.start()
        except Exception:
            _check_sendable(fn, args)
            raise
        finally:
            os.close(self.sink)
        self.pid = self._process.pid or 0

    def release(self) -> None:
        """Release what the process holds, which has ended."""
        super().release()
        self._process.join()
        self._process.close()

    def _poll(self) -> int | None:
        return self._process.exitcode

    def _describe(self, code: int, reported: str | None) -> tuple[int, str]:
        text = reported
        if text is None and not self.said and code == _NO_GUARD:
            code, text = UsageError.exit_code, UNGUARDED
        elif text is None and not self.said and code > 0:
            text = f"could not import the script (exit code {code}); see its output"
        elif text is None:
            suffix = " without a traceback" if code > 0 else ""
            code, text = describe_exit(code)
            text += suffix
        return code, f"rank {self.rank} (pid {self.pid}) {text}"


# -- before ----------------------------------------------------------------------------------------------------------
def _check_sendable(fn: Callable[..., object], args: Sequence[Any]) -> None:
    """Find out why `fn` and `args` could not be pickled for a child process.

    Raises:
        UsageError: names the part that is at fault. None is raised if no part is.
    """
    _check_part(_name(fn), fn, "pass a function of the top level of a module or of the script")
    for i, arg in enumerate(args):
        _check_part(f"args[{i}], of type {type(arg).__name__},", arg, "create it in the function")


def _check_part(name: str, part: Any, cure: str) -> None:
    try:
        ForkingPickler.dumps(part)
    except RuntimeError:  # an object of multiprocessing: it can be pickled only while a process starts
        pass
    except Exception as error:
        raise UsageError(f"{name} cannot be sent to the ranks ({_in_one_line(error)}); {cure}") from None


def check_script(fn: object) -> None:
    """Check that child processes can import the script with `fn`, and that this process is not one that does.

    Raises:
        UsageError: `fn` is defined in a script from stdin, or in a notebook; or this process imports the script, but
            not to be a rank. A rank that imports it ends here, with exit code `_NO_GUARD`.
    """
    if is_importing():
        if multiprocessing.current_process().name.startswith("rank "):  # its parent reports this once, for all ranks
            sys.stdout.flush()
            os._exit(_NO_GUARD)
        raise UsageError(f"this process {UNGUARDED}")
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) or ""
    if main.__spec__ is None and script.startswith("<"):
        raise UsageError(f"the ranks cannot import the script from {script}; save it as a file")
    if not script and main.__spec__ is None and getattr(fn, "__module__", "") == "__main__":
        name = getattr(fn, "__name__", "train")
        raise UsageError(
            f"the ranks cannot import {name} from a notebook, a prompt or -c; write it to a file, in a notebook by a "
            f"cell that begins with %%writefile job.py, and pass job.{name} after import job"
        )


def check_call(fn: Callable[..., object], first: Sequence[str], args: Sequence[Any]) -> None:
    """Check that `fn` takes the arguments named `first`, followed by `args`.

    Raises:
        UsageError: it does not, or is not a function, or a generator or coroutine, or `args` is not a tuple or list.
    """
    if not callable(fn):
        raise UsageError(f"fn is of type {type(fn).__name__}, not a function; pass train, say, not train()")
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        raise UsageError(
            f"a call of {_name(fn)} runs nothing, since it yields or is async; pass a function that runs it"
        )
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"args is a {type(args).__name__}, not a tuple; pass a single value as args=(value,)")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # not every builtin has one
        return
    try:
        signature.bind(*first, *args)
    except TypeError as error:
        given = " and ".join([*first, f"{len(args)} values of args"])
        raise UsageError(
            f"{_name(fn)}({', '.join(signature.parameters)}) cannot be called with {given}: {error}; change its "
            f"parameters or args{'' if first else ', or pass world_size, unless mpiexec starts the ranks'}"
        ) from None


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# -- in that process -------------------------------------------------------------------------------------------------
class _Announced:
    """The channel for reports. Once a child has unpickled it, errors in unpickling the rest are reported there.

    Left to itself, multiprocessing would print a traceback per child.
    """

    def __init__(self, sink: int) -> None:
        self._sink = sink

    def __reduce__(self) -> tuple[Callable[[Any, str], Any], tuple[Any, str]]:
        return _announce, (DupFd(self._sink), getattr(sys.modules["__main__"].__spec__, "name", ""))


def _announce(sink: Any, main: str) -> Any:
    """The excepthook that `_run_rank` must restore.

    Args:
        sink: the channel.
        main: name of the parent's main module in its package, empty for a script.
    """
    supervisor.open(sink.detach())
    before = sys.excepthook
    sys.excepthook = _report_unloadable
    if main.rpartition(".")[2] == "__main__":
        _import_on_demand(main)
    return before


def _import_on_demand(main: str) -> None:
    """Import a `__main__.py` when a function or class of it is looked up: without a guard, it starts ranks itself.

    multiprocessing never imports one.
    """
    module = sys.modules["__main__"]

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del module.__getattr__
        imported = ModuleType("__mp_main__")  # as multiprocessing names it
        if main == "__main__":  # the script is a folder or zip
            content = runpy.run_path(sys.path[0], run_name=imported.__name__)
        else:
            content = runpy.run_module(main, run_name=imported.__name__, alter_sys=True)
        vars(imported).update(content)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = imported
        return getattr(imported, name)

    module.__getattr__ = find  # type: ignore[method-assign]


def _report_unloadable(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for _ in range(3):  # frames of multiprocessing
        trace = trace.tb_next if trace else None
    if trace:  # unpickling has called the user's code
        _fail(1, "failed:\n" + "".join(traceback.format_exception(kind, error, trace)), error)
    cure = "pass args that pickle can restore"
    if isinstance(error, (AttributeError, ImportError)):
        cure = "define the function and the classes of args at the top level of a module or of the script, not under "
        cure += "its guard, at a prompt or in a notebook"
    _fail(UsageError.exit_code, f"failed: cannot load the function or args ({_in_one_line(error)}); {cure}")


def _run_rank(before: Any, fn: Callable[..., object], args: tuple[Any, ...], ticket: Ticket, parent: int) -> None:
    """Run `fn(*args)` in this process, a rank, and report how it ends."""
    sys.excepthook = before
    supervisor.send("begun")
    die_with(parent)
    origin.invitation = (ticket, *args[:2])
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _leave)
    mark_output(args[0])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        fn(*args)
    except Preempted as error:
        supervisor.send("left")
        raise SystemExit(error.code) from None
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is not _nothing:  # the script has raised it
            _fail_by(error)
        raise SystemExit(128 + signal.SIGINT) from None  # the parent reports it once, for all ranks
    except SystemExit as error:
        if not (code := exit_status(error.code)):
            return
        text = f"left with exit code {code}" if isinstance(error.code, int) else f"left: {error.code}"
        _fail(code, text)
    except BaseException as error:
        _fail_by(error)
    finally:
        # Already exiting; another exception would interrupt the cleanup.
        for signum in ENDING_SIGNALS:
            ignore(signum)


def _fail_by(error: BaseException) -> NoReturn:
    flight_record.failed(error)
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of `_run_rank`
    code = error.exit_code if isinstance(error, DistoptError) else 1
    if code == UsageError.exit_code:
        _fail(code, f"failed: {error}")
    _fail(code, "failed:\n" + "".join(traceback.format_exception(type(error), error, frames)), error)


def _fail(code: int, text: str, error: BaseException | None = None) -> NoReturn:
    if not supervisor.is_there and origin.invitation is not None:  # the rank has forked this process, and continues
        forked = f"process {os.getpid()}, which rank {origin.invitation[1]} has forked,"
        sys.stderr.write(f"{forked} {text.rstrip()}\n")
        raise SystemExit(code & 0xFF or 1)
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor.report_failure(code, text, error)
    raise SystemExit(code & 0xFF or 1)


def _interrupt(_signum: int, _: FrameType | None) -> None:
    """Raise it once: a terminal and the parent send the same signal, and at the second Ctrl-C the parent kills."""
    signal.signal(signal.SIGINT, _nothing)
    raise KeyboardInterrupt


def _nothing(_signum: int, _: FrameType | None) -> None:
    """A handler in the place of SIG_IGN, which processes started here would inherit."""


def _leave(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)
