"""What can be wrong with a script, a function and arguments that are to become ranks: found early, told in one line."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ...errors import UsageError
from ..join.multiprocess import UNGUARDED, is_importing

NO_GUARD = os.EX_USAGE  # exit code of a rank whose import of the script reaches a call that starts ranks


def check_sendable(fn: Callable[..., object], args: Sequence[Any]) -> None:
    """Local. Find out why `fn` and `args` could not be pickled for a child process.

    Raises:
        UsageError: names the part that is at fault. None is raised if no part is.
    """
    _check_part(_name(fn), fn, "pass a function of the top level of a module or of the script")
    for i, arg in enumerate(args):
        _check_part(f"args[{i}], of type {type(arg).__name__},", arg, "create it in the function")


def _check_part(name: str, part: Any, cure: str) -> None:
    try:
        ForkingPickler.dumps(part)
    except RuntimeError:  # one of multiprocessing's objects, which can be pickled only while a process starts
        pass
    except Exception as error:
        raise UsageError(f"{name} cannot be sent to the ranks ({in_one_line(error)}); {cure}") from None


def check_script() -> None:
    """Local. Check that child processes can import the script, and that this is not one of them, doing so.

    Raises:
        UsageError: the script comes from stdin; or this process imports it, but not to be a rank. A rank that imports
            it ends here, with exit code `NO_GUARD`.
    """
    if is_importing():
        if multiprocessing.current_process().name.startswith("rank "):  # its parent says so, once for all ranks
            sys.stdout.flush()
            os._exit(NO_GUARD)
        raise UsageError(f"this process {UNGUARDED}")
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) or ""
    if main.__spec__ is None and script.startswith("<"):
        raise UsageError(f"the ranks cannot import the script from {script}; save it as a file")


def check_call(fn: Callable[..., object], first: Sequence[str], args: Sequence[Any]) -> None:
    """Local. Check that `fn` takes the arguments named `first`, followed by `args`.

    Raises:
        UsageError: it does not, or is no function, or `args` is no tuple or list.
    """
    if not callable(fn):
        raise UsageError(f"fn is of type {type(fn).__name__}, not a function; pass train, say, not train()")
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


def in_one_line(error: BaseException) -> str:
    """Local. Type and text."""
    return " ".join(f"{type(error).__name__}: {error}".split())
